"""Types for llama-quantize: what each loses, and which are chosen."""

import itertools
import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from moetool.errors import UsageError
from moetool.export.gguf.file import GgufTensor
from moetool.export.gguf.tensor_types import FewBits, advisable, offered_types, rounding_losses, type_lines
from moetool.format.gguf.blocks import NumberType


def nothing() -> Iterator[Tensor]:
    yield from ()


def tensor(name: str, *shape: int, kind: NumberType = "f16") -> GgufTensor:
    return GgufTensor(name, shape, kind, nothing)


UP = tensor("blk.0.ffn_up_exps.weight", 4, 64, 256)
DOWN = tensor("blk.0.ffn_down_exps.weight", 4, 256, 64)
NORM = tensor("blk.0.ffn_norm.weight", 256, kind="f32")
ROUTER = tensor("blk.0.ffn_gate_inp.weight", 4, 256, kind="f32")
EMBEDDINGS, HEAD = tensor("token_embd.weight", 320, 256), tensor("output.weight", 320, 256)


def names(types: tuple[FewBits, ...]) -> list[str]:
    return [kind.name for kind in types]


def test_rows_say_which_types_there_are() -> None:
    assert names(offered_types(UP, is_tied=False)) == ["q2_K", "q3_K", "q4_K", "q5_K", "q6_K", "q8_0"]
    assert names(offered_types(DOWN, is_tied=False)) == ["iq4_nl", "q5_0", "q5_1", "q8_0"]
    assert not offered_types(tensor("blk.0.attn_q.weight", 64, 48), is_tied=False)
    assert not offered_types(NORM, is_tied=False)
    assert not offered_types(ROUTER, is_tied=False)


def test_what_makes_logits_keeps_six_bits() -> None:
    assert names(offered_types(HEAD, is_tied=False)) == ["q6_K"]
    assert names(offered_types(EMBEDDINGS, is_tied=False)) == ["q4_K"]
    assert names(offered_types(EMBEDDINGS, is_tied=True)) == ["q6_K"]
    assert names(offered_types(tensor("output.weight", 320, 96), is_tied=False)) == ["q8_0"]


def test_blocks_are_those_of_the_library() -> None:
    gguf = pytest.importorskip("gguf", reason="wants the library gguf: pip install moetool[gguf]")
    types = {number.name.lower(): number for number in gguf.GGMLQuantizationType}
    for kind in {*offered_types(UP, is_tied=False), *offered_types(DOWN, is_tied=False)}:
        assert gguf.GGML_QUANT_SIZES[types[kind.name.lower()]] == (kind.layout.numbers, kind.layout.nbytes)


@pytest.mark.parametrize(
    "kind", offered_types(UP, is_tied=False) + offered_types(DOWN, is_tied=False), ids=lambda kind: kind.name
)
def test_a_grid_has_so_many_levels(kind: FewBits) -> None:
    rows = torch.randn(8, 256, generator=torch.Generator().manual_seed(0))
    rows[0] = 0
    rounded = kind.rounded(rows)
    assert all(len(group.unique()) <= 2**kind.bits for group in rounded.view(-1, kind.layout.group))
    assert torch.equal(rounded[0], rows[0])
    groups, found = rows.view(-1, kind.layout.group), rounded.view(-1, kind.layout.group)
    reach = groups.amax(1) - groups.amin(1) if kind.layout.has_minimum else 2 * groups.abs().amax(1)
    step = reach / (2**kind.bits - kind.layout.has_minimum)
    assert bool(((groups - found).abs().amax(1) <= 1.01 * step).all())


def test_losses_weigh_inputs_and_outputs() -> None:
    draw = torch.Generator().manual_seed(0)
    matrices, given = torch.randn(2, 6, 64, generator=draw), torch.rand(2, 64, generator=draw)
    sensitivity, types = torch.rand(12, generator=draw), offered_types(DOWN, is_tied=False)
    found = rounding_losses(iter(matrices), types, given, sensitivity)
    for loss, kind in zip(found, types, strict=True):
        errors = (kind.rounded(matrices.view(12, 64)) - matrices.view(12, 64)).view(2, 6, 64).double()
        expected = torch.einsum("eo,eoi,ei->", sensitivity.view(2, 6).double(), errors.square(), given.double())
        assert loss == pytest.approx(expected.item(), rel=1e-4)
    assert found == sorted(found, reverse=True)


def test_bits_go_where_they_are_missed() -> None:
    """Of two tensors as large the one that loses more gets the better type, and no byte that would help is left."""
    more, less = UP, tensor("blk.1.ffn_up_exps.weight", 4, 64, 256)
    menu = advisable([more, less, NORM])
    losses = {more.name: [64.0, 16, 4, 1, 0.25, 0.01], less.name: [6.4, 1.6, 0.4, 0.1, 0.025, 0.001]}
    for target in (2.7, 3.4, 4.0, 5.2, 7.0):
        chosen = menu.choose(menu.budget(target), losses)
        assert menu.bits_per_weight(chosen) <= target
        assert chosen[more.name].layout.nbytes >= chosen[less.name].layout.nbytes
        lost = sum(losses[name][menu.types[name].index(kind)] for name, kind in chosen.items())
        every = itertools.product(*([(name, kind) for kind in types] for name, types in menu.types.items()))
        fitting = [dict(pick) for pick in every if menu.bits_per_weight(dict(pick)) <= target]
        best = min(sum(losses[name][menu.types[name].index(kind)] for name, kind in pick.items()) for pick in fitting)
        assert lost <= 4 * best
        assert not any(
            menu.bits_per_weight({**chosen, name: kind}) <= target
            for name, types in menu.types.items()
            for kind in types[types.index(chosen[name]) + 1 :]
        )


def test_a_target_below_the_smallest_types_is_refused() -> None:
    menu = advisable([UP, DOWN, NORM, ROUTER, EMBEDDINGS])
    least = menu.bits_per_weight(menu.smallest)
    menu.budget(least)
    with pytest.raises(UsageError, match="smallest types") as refused:
        menu.budget(least - 0.01)
    said = float(str(refused.value).rpartition(" ")[2].removesuffix("."))
    assert least <= said < least + 0.01
    menu.budget(said)


def test_a_line_means_one_tensor() -> None:
    first, other = "blk.1.attn_q.weight", "blk.11.attn_q.weight"
    lines = type_lines(dict.fromkeys((first, other), offered_types(UP, is_tied=False)[0])).splitlines()
    for line, name in zip(lines, (first, other), strict=True):
        pattern, _, kind = line.rpartition("=")
        assert kind == "q2_K"
        assert [found for found in (first, other) if re.search(pattern, found)] == [name]
