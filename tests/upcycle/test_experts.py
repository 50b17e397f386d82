"""What each expert starts as: exact identities on one feed-forward network, in fp64."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from moetool.upcycle.experts import Copies, Experts, PartlyRedrawn, Pieces

ROLES = ("gate", "up", "down")
HIDDEN, WIDTH = 12, 40


class OneFFN:
    """Stands in for a dense model: the same matrices in every layer, a fresh copy at every call."""

    def __init__(self, seed: int = 0, width: int = WIDTH, dtype: torch.dtype = torch.float64) -> None:
        draw = torch.Generator().manual_seed(seed)
        shapes = {"gate": (width, HIDDEN), "up": (width, HIDDEN), "down": (HIDDEN, width)}
        self.intermediate, self.hidden = width, HIDDEN
        self.matrices = {
            role: torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for role, shape in shapes.items()
        }
        self.biases = {
            role: torch.randn(shape[0], generator=draw, dtype=torch.float64).to(dtype) for role, shape in shapes.items()
        }

    def matrix(self, layer: int, role: str) -> Tensor:
        return self.matrices[role].clone()

    def bias(self, layer: int, role: str) -> Tensor:
        return self.biases[role].clone()


def ffn(experts: Any, expert: int, rows: Tensor) -> Tensor:
    """A gated network with biases of one expert."""
    weights = {role: experts.matrix(0, expert, role) for role in ROLES}
    biases = {role: experts.bias(0, expert, role) for role in ROLES}
    gate = F.silu(F.linear(rows, weights["gate"], biases["gate"]))
    return F.linear(gate * F.linear(rows, weights["up"], biases["up"]), weights["down"], biases["down"])


def rows(count: int = 9) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def equal(experts: Experts, other: Experts, expert: int = 1) -> bool:
    return all(
        experts.matrix(0, expert, role).equal(other.matrix(0, expert, role))
        and experts.bias(0, expert, role).equal(other.bias(0, expert, role))
        for role in ROLES
    )


def changed(experts: PartlyRedrawn, dense: OneFFN, layer: int, expert: int, role: Any) -> list[int]:
    """Intermediate channels of a matrix in which anything differs from the dense one."""
    differs = experts.matrix(layer, expert, role) != dense.matrix(layer, role)
    return differs.any(0 if role == "down" else 1).nonzero().flatten().tolist()


# Drop-Upcycling.


@pytest.mark.parametrize("share", [0.0, 0.4 / WIDTH])
def test_nothing_redrawn_is_the_identity(share: float) -> None:
    dense = OneFFN()
    assert equal(PartlyRedrawn(dense, share, seed=0), Copies([dense]))


@pytest.mark.parametrize("share", [2 / WIDTH, 0.25, 0.5, 1.0])
def test_the_same_channels_in_all_three_matrices(share: float) -> None:
    dense = OneFFN()
    experts = PartlyRedrawn(dense, share, seed=0)
    for expert in range(3):
        channels = changed(experts, dense, 2, expert, "gate")
        assert len(channels) == round(share * WIDTH)
        assert changed(experts, dense, 2, expert, "up") == channels
        assert changed(experts, dense, 2, expert, "down") == channels
        for role in ("gate", "up"):
            differs = (experts.bias(2, expert, role) != dense.bias(2, role)).nonzero().flatten()
            assert differs.tolist() == channels
        assert experts.bias(2, expert, "down").equal(dense.bias(2, "down"))


def test_a_redrawn_channel_is_redrawn_whole_and_the_rest_is_bit_for_bit_the_same() -> None:
    dense = OneFFN(dtype=torch.bfloat16)
    experts = PartlyRedrawn(dense, 0.5, seed=0)
    channels = changed(experts, dense, 0, 0, "gate")
    kept = [channel for channel in range(WIDTH) if channel not in channels]
    for role in ROLES:
        found, before = experts.matrix(0, 0, role), dense.matrix(0, role)
        found, before = (found.T, before.T) if role == "down" else (found, before)
        assert found.dtype == torch.bfloat16
        assert found[kept].equal(before[kept])
        assert (found[channels] != before[channels]).double().mean() > 0.9  # bf16 numbers sometimes meet


def test_every_expert_layer_and_seed_has_other_channels_and_other_numbers() -> None:
    dense = OneFFN()
    places = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]
    channels = [changed(PartlyRedrawn(dense, 0.5, seed), dense, layer, e, "up") for seed, layer, e in places]
    assert len({tuple(one) for one in channels}) == len(places)
    whole = PartlyRedrawn(dense, 1.0, seed=0)
    drawn = [whole.matrix(layer, e, role) for layer, e in ((0, 0), (0, 1), (1, 0)) for role in ("gate", "up")]
    assert not any(one.equal(other) for i, one in enumerate(drawn) for other in drawn[:i])


def test_gate_up_and_down_are_drawn_independently() -> None:
    dense = OneFFN(width=2000)
    whole = PartlyRedrawn(dense, 1.0, seed=0)
    drawn = torch.stack([whole.matrix(0, 0, role).flatten() for role in ROLES])
    assert torch.corrcoef(drawn).triu(1).abs().max() < 0.05
    biases = torch.stack([whole.bias(0, 0, role) for role in ("gate", "up")])
    assert torch.corrcoef(biases)[0, 1].abs() < 0.1


def test_what_is_redrawn_does_not_depend_on_what_was_asked_for_before() -> None:
    one, other = PartlyRedrawn(OneFFN(), 0.5, seed=0), PartlyRedrawn(OneFFN(), 0.5, seed=0)
    other.matrix(0, 3, "down")
    other.bias(0, 1, "up")
    for role in reversed(ROLES):
        assert other.matrix(0, 1, role).equal(one.matrix(0, 1, role))
    assert equal(other, one)


@pytest.mark.parametrize("role", ROLES)
def test_redrawn_numbers_have_mean_and_deviation_of_those_they_replace(role: Any) -> None:
    """Not of the whole matrix, whose other channels are far away here."""
    dense = OneFFN(width=2000)
    channels = changed(PartlyRedrawn(dense, 0.5, seed=0), dense, 0, 0, role)
    axis = 1 if role == "down" else 0
    kept = torch.ones(2000, dtype=torch.bool).index_fill(0, torch.tensor(channels), False).nonzero().flatten()
    shifted = 0.5 * dense.matrices[role] + 3
    dense.matrices[role] = shifted.index_fill(axis, kept, 1000.0)
    found = PartlyRedrawn(dense, 0.5, seed=0).matrix(0, 0, role).index_select(axis, torch.tensor(channels))
    replaced = shifted.index_select(axis, torch.tensor(channels))
    assert found.numel() == 12_000
    assert found.mean().item() == pytest.approx(replaced.mean().item(), abs=0.02)
    assert found.std().item() == pytest.approx(replaced.std().item(), rel=0.02)
    # Normal: kurtosis 3, where the same deviation from a uniform distribution has 1.8.
    assert ((found - found.mean()) / found.std()).pow(4).mean().item() == pytest.approx(3, abs=0.2)
    assert not found.equal(replaced)


def test_numbers_that_do_not_vary_are_redrawn_as_themselves() -> None:
    dense = OneFFN()
    dense.matrices = {role: torch.full_like(matrix, 2.0) for role, matrix in dense.matrices.items()}
    experts = PartlyRedrawn(dense, 1.0, seed=0)
    assert all(experts.matrix(0, 0, role).equal(dense.matrices[role]) for role in ROLES)


# Virtual groups.


@pytest.mark.parametrize("granularity", [1, 2, 4, 5, WIDTH])
def test_the_pieces_of_a_copy_are_the_network(granularity: int) -> None:
    """Each counts with 1/granularity, as it does if all have the same router row. Biases included."""
    dense = OneFFN()
    pieces = Pieces(dense, granularity, torch.float64)
    expected = ffn(Copies([dense]), 0, rows())
    for copy in (0, 3):
        own = range(copy * granularity, (copy + 1) * granularity)
        found = torch.stack([ffn(pieces, expert, rows()) for expert in own]).mean(0)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_only_down_is_scaled_and_every_channel_is_there_once() -> None:
    dense = OneFFN()
    pieces = Pieces(dense, 4, torch.float64)
    for role in ("gate", "up"):
        assert torch.cat([pieces.matrix(0, expert, role) for expert in range(4)]).equal(dense.matrices[role])
        assert torch.cat([pieces.bias(0, expert, role) for expert in range(4)]).equal(dense.biases[role])
    down = torch.cat([pieces.matrix(0, expert, "down") for expert in range(4)], dim=1)
    assert down.equal(4 * dense.matrices["down"])
    assert pieces.matrix(0, 6, "up").equal(pieces.matrix(0, 2, "up"))


def test_down_is_scaled_in_the_dtype_of_the_result() -> None:
    """Three times a bf16 number is none, but it is one of fp32."""
    dense = OneFFN(width=39, dtype=torch.bfloat16)
    pieces = Pieces(dense, 3, torch.float32)
    down = torch.cat([pieces.matrix(0, expert, "down") for expert in range(3)], dim=1)
    assert down.dtype == torch.float32
    assert (down.double() / 3 == dense.matrices["down"].double()).all()
    assert not (down.bfloat16() == down).all()


@pytest.mark.parametrize(("copies", "granularity", "top_k"), [(2, 2, 1), (4, 4, 2), (5, 3, 2), (8, 8, 3)])
def test_top_k_of_repeated_rows_takes_copies_whole(copies: int, granularity: int, top_k: int) -> None:
    router = torch.randn(copies, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logits = rows(200) @ router.T
    repeated = rows(200) @ router.repeat_interleave(granularity, 0).T
    weights, chosen = repeated.softmax(-1).topk(top_k * granularity, dim=-1)
    counts = F.one_hot(chosen // granularity, copies).sum(1)
    assert set(counts.flatten().tolist()) == {0, granularity} if top_k < copies else {granularity}
    whole = logits.softmax(-1).topk(top_k, dim=-1)
    assert (counts.gather(1, whole.indices) == granularity).all()
    # And each piece has 1/granularity of what its copy would have.
    weights = weights / weights.sum(-1, keepdim=True)
    shares = torch.zeros(200, copies, dtype=torch.float64).scatter_add_(1, chosen // granularity, weights)
    expected = whole.values / whole.values.sum(-1, keepdim=True)
    torch.testing.assert_close(shares.gather(1, whole.indices), expected, rtol=1e-12, atol=1e-12)


# Several sources.


def test_sources_take_turns() -> None:
    sources = [OneFFN(seed) for seed in range(3)]
    experts = Copies(sources)
    for expert in range(7):
        assert ffn(experts, expert, rows()).equal(ffn(Copies([sources[expert % 3]]), 0, rows()))
