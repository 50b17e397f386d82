"""Products that round tokens to whole numbers: near the exact ones, the same in all instructions, and not for all."""

import os
import platform
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moetool.compiled import compiler
from moetool.kernels.products import routed
from moetool.kernels.rounding import exact_products, is_allowed
from moetool.kernels.table import Table
from moetool.numerics.packing import packed_size
from moetool.numerics.quantization import BITS, is_whole
from moetool.representations.operand import Operand, numbers

pytestmark = pytest.mark.skipif(bool(compiler.problem()), reason=compiler.problem())
BOUND = 1e-3  # how far products may be off, relative to their length
SHAPES = [((64, 96), 32), ((40, 192), 64), ((24, 256), 128), ((16, 512), 512)]
WIDE = [((40, 8256), 96), ((40, 8320), 64)]


@pytest.fixture(autouse=True)
def rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOETOOL_KERNELS")


def coded(kind: str, shape: tuple[int, int], group: int, seed: int = 0) -> Operand:
    generator = torch.Generator().manual_seed(seed)
    if kind == "int8":
        data = torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator)
        return Operand("int8", shape, data, torch.rand(shape[0], 1, generator=generator), 8, shape[1])
    size = (packed_size(shape[0] * shape[1], int(kind)),)
    data = torch.randint(0, 255, size, dtype=torch.uint8, generator=generator)
    return Operand("codes", shape, data, torch.rand(shape[0], shape[1] // group, generator=generator), int(kind), group)


def table(*operands: Operand) -> Table:
    return Table([((operand,),) for operand in operands], (operands[0].outputs, operands[0].inputs), ())


def exactly(of: Table, chosen: Tensor, inputs: Tensor) -> Tensor:
    with exact_products():
        return routed(of, chosen, inputs)


def tokens(count: int, columns: int) -> Tensor:
    """With outliers, as models have them."""
    inputs = torch.randn(count, columns, generator=torch.Generator().manual_seed(1))
    inputs[:, 5] *= 20
    return inputs


KINDS = [str(bits) for bits in BITS]


def bound(kind: str) -> float:
    """Beside codes of 5 bits and more words are four times as fine."""
    return BOUND / 4 if is_whole(int(kind)) else BOUND


@pytest.mark.parametrize(("shape", "group"), SHAPES + WIDE, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_near_the_exact_product(kind: str, shape: tuple[int, int], group: int, instructions: str) -> None:
    of, inputs = table(coded(kind, shape, group), coded(kind, shape, group, 1)), tokens(6, shape[1])
    chosen = torch.tensor([0, 1, 1, 1, 1, 1])  # more than four of one
    expected = exactly(of, chosen, inputs)
    found = routed(of, chosen, inputs)
    assert not found.equal(expected)
    error = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < bound(kind)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have one set of instructions here")
@pytest.mark.parametrize(("shape", "group"), SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_integers_are_the_same_in_all_instructions(
    kind: str, shape: tuple[int, int], group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left is the order of fp32 sums: far less than rounding to other integers would be."""
    of, inputs = table(coded(kind, shape, group)), tokens(1, shape[1])
    native = routed(of, torch.tensor([0]), inputs)
    command = (os.environ.get("CXX") or "c++").split()
    monkeypatch.setattr(compiler, "_LOADED", [compiler.load(command, ("-O1", "-march=x86-64", "-fopenmp"))])
    torch.testing.assert_close(routed(of, torch.tensor([0]), inputs), native, rtol=0, atol=2e-6 * float(native.norm()))


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_are_whole_numbers_lose_nothing_but_levels(kind: str) -> None:
    """A block whose largest number is 8191, or beside codes of 5 bits and more 32767, is stored as it is; the levels of
    these and of 1 bit are, too."""
    shape, largest = (16, 128), 32767 if is_whole(int(kind)) else 8191
    of, inputs = table(coded(kind, shape, 128)), torch.randint(-largest, largest + 1, (1, 128)).float()
    inputs[0, 0] = largest
    expected, found = exactly(of, torch.tensor([0]), inputs), routed(of, torch.tensor([0]), inputs)
    assert (found - expected).norm() / expected.norm() < (1e-4 if kind in "234" else 2e-6)


@pytest.mark.parametrize("width", [1024, 4096, 8320])
@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_equal_alone_and_among_others_on_any_number_of_threads(
    kind: str, width: int, request: pytest.FixtureRequest
) -> None:
    of, inputs = table(*(coded(kind, (64, width), 64, seed) for seed in range(3))), tokens(9, width)
    chosen = torch.tensor([0, 2, 2, 1, 2, -1, 2, 0, 2])
    expected = routed(of, chosen, inputs)
    assert not expected[5].any()
    for _ in range(2):
        assert routed(of, chosen, inputs).equal(expected)
        for token in range(9):
            assert routed(of, chosen[token : token + 1], inputs[token : token + 1])[0].equal(expected[token])
        request.getfixturevalue("two_threads")


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_that_is_not_finite_is_multiplied_exactly(kind: str, number: float, instructions: str) -> None:
    """And the others, as if it were not there."""
    of, inputs, chosen = table(coded(kind, (64, 256), 128)), tokens(4, 256), torch.zeros(4, dtype=torch.int64)
    clean = routed(of, chosen, inputs)
    inputs[1, 200] = number
    found, expected = routed(of, chosen, inputs), exactly(of, chosen, inputs)
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=0, equal_nan=True)
    assert not found[1].isfinite().any()
    assert found[[0, 2, 3]].equal(clean[[0, 2, 3]])


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_and_numbers_of_any_size(kind: str, instructions: str) -> None:
    operand = coded(kind, (64, 256), 128)
    assert operand.scales is not None
    operand.scales[3] = 0
    of, inputs, chosen = table(operand), tokens(4, 256), torch.zeros(4, dtype=torch.int64)
    inputs[0] = 0
    inputs[1, :128] = 0  # a block
    inputs[2], inputs[3] = inputs[2] * 1e33, inputs[3] * 1e-36
    found, expected = routed(of, chosen, inputs), exactly(of, chosen, inputs)
    assert not found[0].any()
    assert not found[:, 3].any()
    assert found.isfinite().all()
    assert (found[3] - expected[3]).abs().max() < 1e-28
    for token in (1, 2):
        unit = expected[token].abs().max()
        assert ((found - expected)[token] / unit).norm() < bound(kind) * (expected[token] / unit).norm()


@pytest.mark.parametrize(
    ("kind", "shape", "group"),
    [
        (kind, *case)
        for kind in KINDS
        for case in (((64, 48), 16), ((37, 64), 32), ((64, 50), 25), ((9, 7), 7), ((1, 1), 1))
        if (kind, case[1]) != ("8", 32)  # of which rows may be any number
    ],
    ids=str,
)
def test_odd_widths_stay_exact(kind: str, shape: tuple[int, int], group: int) -> None:
    of, chosen = table(coded(kind, shape, group)), torch.zeros(3, dtype=torch.int64)
    inputs = tokens(3, max(6, shape[1]))[:, : shape[1]].contiguous()
    assert routed(of, chosen, inputs).equal(exactly(of, chosen, inputs))


def test_codes_of_bitsandbytes_stay_exact() -> None:
    of, inputs, chosen = table(coded("int8", (64, 256), 128)), tokens(3, 256), torch.zeros(3, dtype=torch.int64)
    assert routed(of, chosen, inputs).equal(exactly(of, chosen, inputs))


def test_some_rows_sums_and_what_has_no_codes(instructions: str) -> None:
    """Rows that have their places among others, a base in other blocks beside them, and numbers, which are exact."""
    rows = replace(coded("4", (64, 256), 128), places=torch.randperm(128)[:64].int())
    base, plain = coded("2", (128, 256), 64), numbers(torch.randn(128, 256))
    inputs, chosen = tokens(2, 256), torch.zeros(2, dtype=torch.int64)
    for products in (((rows,), (base,)), ((rows,), (base,), (plain,))):
        of = Table([products], (128, 256), ())
        found, expected = routed(of, chosen, inputs), exactly(of, chosen, inputs)
        assert not found.equal(expected)
        assert (found - expected).norm() / expected.norm() < BOUND
    of = Table([((plain,),)], (128, 256), ())
    assert routed(of, chosen, inputs).equal(exactly(of, chosen, inputs))


def test_who_may_round(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_allowed()
    with exact_products():
        with exact_products():
            assert not is_allowed()
        assert not is_allowed()
    assert is_allowed()
    monkeypatch.setenv("MOETOOL_KERNELS", "Exact")
    assert not is_allowed()
