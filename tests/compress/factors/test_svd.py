"""Differences in the norm of their inputs: against the textbook, with the matrices written out."""

import pytest
import torch
from draws import normal
from torch import Tensor

from moetool.architectures import MoEShape, Role
from moetool.calibration.collectors import GramCollector
from moetool.calibration.held_experts import ExpertRun
from moetool.compress.budget.items import Group, Ladder
from moetool.compress.budget.spending import allocate
from moetool.compress.factors.svd import LayerSvd, Svd
from moetool.numerics.factorize import truncate
from moetool.numerics.output_norm import ChannelNorm, LinkedNorm, OutputNorm
from moetool.representations.low_rank import LowRank

CPU = torch.device("cpu")
WIDE = MoEShape(experts=3, top_k=1, hidden=6, intermediate=10)
NARROW = MoEShape(experts=3, top_k=1, hidden=10, intermediate=6)
TOKENS = [400, 5, 0]


class Layer:
    """Differences and inputs of three experts: one busy, one rarely used, one never."""

    def __init__(self, shape: MoEShape) -> None:
        self.shape = shape
        mixing = normal(shape.hidden, shape.hidden, seed=1) / shape.hidden**0.5
        self.inputs = [normal(count, shape.hidden, seed=10 + e) @ mixing for e, count in enumerate(TOKENS)]
        self.activations = [normal(count, shape.intermediate, seed=20 + e).relu() for e, count in enumerate(TOKENS)]
        self.grams = GramCollector(shape, lambda e: self.delta("down", e), sum(TOKENS), CPU)
        for expert, (x, h) in enumerate(zip(self.inputs, self.activations, strict=True)):
            if len(x):
                nothing = torch.empty(0)
                self.grams.observe(expert, torch.zeros(len(x)), x, ExpertRun(nothing, h, nothing, nothing, torch.relu))

    def delta(self, role: Role, expert: int) -> Tensor:
        return normal(*self.shape.matrix(role), seed=100 + 10 * expert + len(role))

    def given(self, role: Role) -> list[Tensor]:
        """What a role's matrices are multiplied with, fp64."""
        return [x.double() for x in (self.activations if role == "down" else self.inputs)]

    def shrunk(self, role: Role, expert: int) -> Tensor:
        """`(1 - ρ) G + ρ T Ḡ`, ρ = T₀ / (T + T₀), T₀ a quarter of the inputs: the norm that is asked for."""
        given = self.given(role)
        own, count, prior = given[expert].T @ given[expert], len(given[expert]), 0.25 * given[expert].shape[1]
        everything = torch.cat(given)
        if role == "down" and self.grams.wide_down:
            everything = self.grams.sample().double()
        mean = everything.T @ everything / len(everything)
        rho = prior / (count + prior)
        return (1 - rho) * own + rho * count * mean


@pytest.fixture(params=[WIDE, NARROW], ids=["wide down", "narrow down"])
def layer(request: pytest.FixtureRequest) -> Layer:
    return Layer(request.param)


each_role = pytest.mark.parametrize("role", ["gate", "down"])


def approximation(
    svd: LayerSvd, layer: Layer, role: Role, expert: int, rank: int, outputs: OutputNorm | None = None
) -> Tensor:
    delta = layer.delta(role, expert)
    found = svd.whitened(role, expert, delta, outputs).factorize()
    u, v = truncate(delta, found, rank, torch.float64, norm=outputs)
    return u @ v


def norm(matrix: Tensor, gram: Tensor) -> float:
    return float(((matrix @ gram) * matrix).sum())


@each_role
@pytest.mark.parametrize("rank", [0, 1, 3, 6])
def test_vanilla_is_eckart_young(layer: Layer, role: Role, rank: int) -> None:
    delta = layer.delta(role, 0).double()
    left, values, right = torch.linalg.svd(delta, full_matrices=False)
    best = left[:, :rank] * values[:rank] @ right[:rank]
    found = approximation(LayerSvd("vanilla", None), layer, role, 0, rank)
    torch.testing.assert_close(found, best, rtol=1e-5, atol=1e-5)
    factorization = LayerSvd("vanilla", None).whitened(role, 0, layer.delta(role, 0)).factorize()
    torch.testing.assert_close(factorization.spectrum, values.square(), rtol=1e-10, atol=1e-10)
    assert factorization.energy == pytest.approx(float(delta.square().sum()), rel=1e-12)


@each_role
def test_vanilla_does_not_look_at_statistics(layer: Layer, role: Role) -> None:
    delta = layer.delta(role, 0)
    with_grams = LayerSvd("vanilla", layer.grams).whitened(role, 0, delta).factorize()
    assert with_grams.spectrum.equal(LayerSvd("vanilla", None).whitened(role, 0, delta).factorize().spectrum)
    assert not LayerSvd("vanilla", layer.grams).is_whitened


@each_role
@pytest.mark.parametrize("expert", [0, 1])
def test_spectrum_is_that_of_the_shrunk_norm(layer: Layer, role: Role, expert: int) -> None:
    delta = layer.delta(role, expert)
    found = LayerSvd("truncation-aware", layer.grams).whitened(role, expert, delta).factorize()
    lost = delta.double() @ layer.shrunk(role, expert) @ delta.double().T
    expected = torch.linalg.eigvalsh(lost).flip(0)[: min(delta.shape)].clamp_min(0)
    torch.testing.assert_close(found.spectrum, expected, rtol=1e-5, atol=1e-5 * float(expected[0]))
    assert found.energy == pytest.approx(float(lost.trace()), rel=1e-6)


@each_role
@pytest.mark.parametrize("expert", [0, 1])
@pytest.mark.parametrize("rank", [1, 3])
def test_truncation_aware_is_the_best_in_that_norm(layer: Layer, role: Role, expert: int, rank: int) -> None:
    """It reaches the sum of the eigenvalues that are left, which nothing of its rank can undercut."""
    delta, gram = layer.delta(role, expert).double(), layer.shrunk(role, expert)
    values = torch.linalg.eigvalsh(delta @ gram @ delta.T).flip(0)[: min(delta.shape)]
    found = approximation(LayerSvd("truncation-aware", layer.grams), layer, role, expert, rank)
    assert torch.linalg.matrix_rank(found) == rank
    assert norm(delta - found, gram) == pytest.approx(float(values[rank:].sum()), rel=1e-5)
    plain = approximation(LayerSvd("vanilla", None), layer, role, expert, rank)
    assert norm(delta - found, gram) < norm(delta - plain, gram)


def test_shrinkage_matters_only_for_the_rarely_used(layer: Layer) -> None:
    """5 tokens in 6 or 10 dimensions: their own Gram matrix alone would leave directions without any weight."""
    raw = layer.given("gate")
    for expert, near in ((0, True), (1, False)):
        own = raw[expert].T @ raw[expert]
        difference = (layer.shrunk("gate", expert) - own).norm() / own.norm()
        assert (difference < 0.02) == near
    svd = LayerSvd("truncation-aware", layer.grams)
    rare = svd.whitened("gate", 1, layer.delta("gate", 1)).factorize()
    assert (rare.spectrum > 1e-3 * rare.spectrum[0]).sum() > 5 * (layer.shape is NARROW)


@each_role
def test_an_unreached_expert_gets_the_norm_of_one_average_token(layer: Layer, role: Role) -> None:
    delta = layer.delta(role, 2)
    everything = torch.cat(layer.given(role)[:2])
    if role == "down" and layer.grams.wide_down:
        everything = layer.grams.sample().double()
    lost = delta.double() @ (everything.T @ everything / len(everything)) @ delta.double().T
    found = LayerSvd("truncation-aware", layer.grams).whitened(role, 2, delta).factorize()
    expected = torch.linalg.eigvalsh(lost).flip(0)[: min(delta.shape)].clamp_min(0)
    torch.testing.assert_close(found.spectrum, expected, rtol=1e-5, atol=1e-5 * float(expected[0]))


def asvd_gram(given: list[Tensor], expert: int) -> Tensor:
    """diag(mean |x|), ASVD's choice for α = ½, with the energy of the inputs; of all of them where there are none."""
    x = given[expert] if len(given[expert]) else torch.cat(given)
    energy = x.square().sum() / (1 if len(given[expert]) else len(x))
    means = x.abs().mean(0)
    return torch.diag(means * energy / means.sum())


@each_role
@pytest.mark.parametrize("expert", [0, 1, 2])
def test_activation_aware_scales_channels_by_the_root_of_their_mean(layer: Layer, role: Role, expert: int) -> None:
    """ASVD: the plain SVD of Δ diag(mean |x|)^½, in units of squared output."""
    delta = layer.delta(role, expert)
    found = LayerSvd("activation-aware", layer.grams).whitened(role, expert, delta).factorize()
    scale = asvd_gram(layer.given(role), expert).diagonal().sqrt()
    expected = torch.linalg.svdvals(delta.double() * scale).square()
    torch.testing.assert_close(found.spectrum, expected, rtol=1e-6, atol=1e-6 * float(expected[0]))


@each_role
@pytest.mark.parametrize("method", ["truncation-aware", "activation-aware"])
def test_the_expert_with_more_tokens_gets_the_higher_rank(layer: Layer, role: Role, method: Svd) -> None:
    """Of two with the same difference; and what a spectrum says is about what is lost on those tokens."""
    delta = layer.delta(role, 0)
    found = [LayerSvd(method, layer.grams).whitened(role, expert, delta).factorize() for expert in (0, 1)]
    for expert, factorization in enumerate(found):
        lost = float((layer.given(role)[expert] @ delta.double().T).square().sum())
        assert 0.3 < factorization.energy / lost < 3
    ladder = Ladder((60, 60), torch.bfloat16)
    items = {
        (0, role, expert): ladder.item(torch.cat([own.spectrum, torch.zeros(60)]), own.energy)
        for expert, own in enumerate(found)
    }
    first, second = allocate("water-filling", [Group(items)], 6 * ladder.step_bytes).values()
    assert isinstance(first, LowRank)
    assert isinstance(second, LowRank)
    assert first.rank > second.rank


@each_role
def test_a_shared_v_counts_all_tokens(layer: Layer, role: Role) -> None:
    """Even where the norm is that of a sample: gate and down compete for the same bytes."""
    deltas = [layer.delta(role, expert) for expert in range(3)]
    svd = LayerSvd("truncation-aware", layer.grams)
    found = svd.whitened_jointly(role, deltas, "v", [None] * 3).factorize()
    everything = torch.cat(layer.given(role))
    lost = float((everything @ torch.cat(deltas).double().T).square().sum())
    assert lost / 3 < found.energy < 3 * lost  # by a sample of 13 of the 405


@pytest.mark.parametrize("method", ["vanilla", "truncation-aware"])
@pytest.mark.parametrize(("experts", "rows"), [(2, 30), (3, 18), (3, 10)])
def test_a_shared_u_whichever_side_is_longer(method: Svd, experts: int, rows: int) -> None:
    """Few narrow experts side by side are higher than wide."""
    layer = Layer(MoEShape(experts=3, top_k=1, hidden=6, intermediate=rows))
    deltas = [layer.delta("gate", expert) for expert in range(experts)]
    found = LayerSvd(method, layer.grams).whitened_jointly("gate", deltas, "u", [None] * experts).factorize()
    beside = torch.cat(deltas, dim=1)
    for rank in (1, 3):
        u, v = truncate(beside, found, rank, torch.float64)
        assert (u.shape, v.shape) == ((rows, rank), (rank, 6 * experts))
        whole = torch.block_diag(*(own.T @ own for own in layer.given("gate")[:experts]))
        gram = torch.eye(6 * experts).double() if method == "vanilla" else whole
        values = torch.linalg.eigvalsh(beside.double() @ gram @ beside.double().T).flip(0)
        assert norm(beside.double() - u @ v, gram) == pytest.approx(float(values[rank:].sum()), rel=1e-5)


@each_role
@pytest.mark.parametrize("method", ["vanilla", "truncation-aware", "activation-aware"])
@pytest.mark.parametrize("linked", [False, True])
def test_a_norm_of_outputs_whitens_from_the_left(layer: Layer, role: Role, method: Svd, linked: bool) -> None:
    """Best in `‖R (Δ - UV) X‖`, and UV approximates Δ itself, not R Δ."""
    delta = layer.delta(role, 0).double()
    norm_of: OutputNorm = ChannelNorm(torch.linspace(0.2, 3, len(delta)))
    if linked:
        noise = torch.randn(len(delta), len(delta), generator=torch.Generator().manual_seed(3))
        norm_of = LinkedNorm((torch.triu(noise, 1) + torch.diag(torch.linspace(0.4, 3, len(delta))),))
    svd = LayerSvd(method, layer.grams)
    gram = {
        "vanilla": torch.eye(delta.shape[1], dtype=torch.float64),
        "truncation-aware": layer.shrunk(role, 0),
        "activation-aware": asvd_gram(layer.given(role), 0),
    }[method]
    scaled = norm_of.times(delta)
    values = torch.linalg.eigvalsh(scaled @ gram @ scaled.T).flip(0)[: min(delta.shape)]
    factorization = svd.whitened(role, 0, layer.delta(role, 0), norm_of).factorize()
    torch.testing.assert_close(factorization.spectrum, values, rtol=1e-5, atol=1e-5 * float(values[0]))
    found = approximation(svd, layer, role, 0, 3, norm_of)
    error = norm_of.times(delta - found)
    assert norm(error, gram) == pytest.approx(float(values[3:].sum()), rel=1e-4)


@each_role
def test_a_given_rank_is_a_prefix(layer: Layer, role: Role) -> None:
    delta = layer.delta(role, 0)
    svd = LayerSvd("truncation-aware", layer.grams)
    some, everything = svd.whitened(role, 0, delta).factorize(2), svd.whitened(role, 0, delta).factorize()
    torch.testing.assert_close(some.spectrum[:2], everything.spectrum[:2], rtol=1e-4, atol=0)


@pytest.mark.parametrize("method", ["truncation-aware", "activation-aware"])
def test_statistics_are_needed(method: Svd) -> None:
    with pytest.raises(ValueError, match=f"{method} SVD needs calibration statistics"):
        LayerSvd(method, None)
