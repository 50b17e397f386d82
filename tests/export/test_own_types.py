"""What types of a file lose whose codes moetool chooses, and which sizes they give."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from moetool.errors import UsageError
from moetool.export.blocks.coding import block_codes
from moetool.export.blocks.prepared_gram import PreparedGram
from moetool.export.choosing import losses as trying
from moetool.export.choosing.losses import TypeLosses, try_types
from moetool.export.gguf.file import GgufTensor
from moetool.export.gguf.own_types import own_menu
from moetool.format.gguf.blocks import BLOCK_TYPES, NumberType

KINDS = [BLOCK_TYPES[name] for name in ("q2_k", "q4_k", "q8_0")]


def tensor(name: str, *shape: int, kind: NumberType = "q8_0") -> GgufTensor:
    def parts() -> Iterator[Tensor]:
        yield from ()

    return GgufTensor(name, shape, kind, parts)


UP, DOWN = tensor("blk.0.ffn_up_exps.weight", 4, 64, 256), tensor("blk.0.ffn_down_exps.weight", 4, 256, 96)
REST = [
    tensor("blk.0.ffn_norm.weight", 256, kind="f32"),
    tensor("blk.0.ffn_gate_inp.weight", 4, 256, kind="f32"),
    tensor("blk.0.attn_q.weight", 64, 40, kind="f16"),
    tensor("token_embd.weight", 320, 256),
]


def test_layers_embeddings_and_head_have_a_choice_and_nothing_else() -> None:
    menu = own_menu([UP, DOWN, *REST])
    assert [kind.name for kind in menu.types[UP.name]] == [
        *("iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq4_xs", "q4_k", "q5_k", "q6_k", "q8_0")
    ]
    assert [kind.name for kind in menu.types[DOWN.name]] == ["iq4_nl", "q5_0", "q5_1", "q8_0"]
    assert [kind.name for kind in menu.types["token_embd.weight"]] == [
        *("iq3_s", "iq4_xs", "q4_k", "q5_k", "q6_k", "q8_0")
    ]
    assert set(menu.types) == {UP.name, DOWN.name, "token_embd.weight"}
    for types in menu.types.values():
        sizes = [kind.size(1024) for kind in types]
        assert sizes == sorted(sizes)


def test_what_is_too_few_is_told_with_both_ends() -> None:
    menu = own_menu([UP, DOWN, *REST])
    least, most = menu.bits_per_weight(menu.smallest), menu.bits_per_weight(menu.largest)
    assert menu.budget(most + 1) >= menu.nbytes(menu.largest)
    with pytest.raises(UsageError, match=f"{most:.2f} bits per weight") as refused:
        menu.budget(least - 0.01)
    assert float(str(refused.value).rpartition(" ")[2].removesuffix(".")) == pytest.approx(least, abs=0.01)


@pytest.fixture
def given() -> Tensor:
    torch.manual_seed(0)
    inputs = torch.randn(900, 256) @ (torch.eye(256) + 0.05 * torch.randn(256, 256))
    return inputs.T @ inputs


def test_all_rows_tried_say_what_the_codes_lose(given: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trying, "_ROWS", 48)
    draw, losses = torch.Generator().manual_seed(1), TypeLosses(KINDS)
    inputs, expected = PreparedGram.of(given), torch.zeros(len(KINDS), dtype=torch.float64)
    assert inputs is not None
    for _ in range(2):
        rows, sensitivity = torch.randn(48, 256, generator=draw), torch.rand(48, generator=draw)
        try_types([losses], [rows], given.diagonal(), [sensitivity], inputs)
        for index, kind in enumerate(KINDS):
            errors = (rows - block_codes(rows, kind, inputs).decoded().T).double()
            expected[index] += ((errors @ given.double() * errors).sum(1) * sensitivity).sum()
    torch.testing.assert_close(torch.tensor(losses.estimates(), dtype=torch.float64), expected, rtol=1e-3, atol=0)


def test_a_few_rows_and_experts_stand_for_all(given: Tensor) -> None:
    """An expert that is not tried counts by what its inputs and gradients are, to a tenth of what it would lose."""
    draw, inputs = torch.Generator().manual_seed(1), PreparedGram.of(given)
    tried, whole = TypeLosses(KINDS), TypeLosses(KINDS)
    for number, scale in enumerate((1.0, 3.0)):
        rows, sensitivity = torch.randn(128, 256, generator=draw) * scale, torch.rand(128, generator=draw)
        try_types([whole], [rows], given.diagonal(), [sensitivity], inputs)
        try_types([tried], [rows], given.diagonal(), [sensitivity], inputs if number == 0 else None)
    for few, all_ in zip(tried.estimates(), whole.estimates(), strict=True):
        assert few == pytest.approx(all_, rel=0.1)


def test_what_no_token_reached_costs_nothing(given: Tensor) -> None:
    losses = TypeLosses(KINDS)
    try_types([losses], [torch.randn(8, 256)], torch.zeros(256), [torch.zeros(8)], None)
    assert losses.estimates() == [0, 0, 0]
