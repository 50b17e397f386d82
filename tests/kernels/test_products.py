"""Kernels multiply by what is stored: every representation, shape, dtype and instruction set, alone or among others."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from moetool.compiled import compiler
from moetool.kernels import cpu
from moetool.kernels.products import linear, routed
from moetool.kernels.table import Table
from moetool.numerics.packing import packed_size
from moetool.numerics.quantization import BITS
from moetool.representations import parse_representation, representations
from moetool.representations.operand import Operand, factors, numbers

SHAPES = [(24, 32), (64, 48), (40, 64), (37, 50), (96, 128), (9, 7), (64, 1)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(bool(compiler.problem()), reason=compiler.problem())


def error(found: Tensor, expected: Tensor) -> float:
    return float(torch.linalg.norm(found.double() - expected) / torch.linalg.norm(expected).clamp_min(1e-30))


@torch.no_grad()
@pytest.mark.parametrize("kind", list(representations()))
def test_every_representation(kind: str, instructions: str) -> None:
    """Of four matrices, three each of the same form and one that nobody has."""
    generator = torch.Generator().manual_seed(0)
    seen = 0
    for shape in SHAPES:
        for dtype in DTYPES if instructions == "native" or shape in SHAPES[:4] else DTYPES[:1]:
            for spec in representations()[kind].examples:
                try:
                    representation = parse_representation(spec).fitted(shape)
                    matrix = torch.randn(shape, generator=generator)
                    stored = {name: own.contiguous() for name, own in representation.encode(matrix, dtype).items()}
                except ValueError:  # a rank, or groups, that the shape does not have
                    continue
                weight = representation.build(shape, dtype, CPU)
                names = representation.tensors(shape)
                weight.load_state_dict({name: stored[name] for name in names}, assign=True)
                weight.share(stored)
                exact = weight.dense().detach().double()
                table = Table([weight.products()] * 3, shape, weight.modules())
                for tokens in (1, 2, 9):
                    inputs = torch.randn(tokens, shape[1], generator=generator)
                    chosen = torch.randint(0, 4, (tokens,), generator=generator)
                    expected = (inputs.double() @ exact.T).masked_fill((chosen == 3)[:, None], 0)
                    assert error(routed(table, chosen, inputs), expected) < 1e-5, (spec, shape, dtype, tokens)
                    found = linear(weight.products(), inputs, shape[0])
                    assert error(found, inputs.double() @ exact.T) < 1e-5, (spec, shape, dtype, tokens)
                seen += 1
    assert seen


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("kind", list(representations()))
def test_where_the_processor_has_no_products_of_16_bits(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it is computed in fp32, and the result is rounded once."""
    monkeypatch.setattr(cpu, "lacks_products", lambda dtype: dtype != torch.float32)
    shape = (24, 32)
    representation = parse_representation(representations()[kind].examples[0]).fitted(shape)
    stored = {name: own.contiguous() for name, own in representation.encode(torch.randn(shape), dtype).items()}
    weight = representation.build(shape, dtype, CPU)
    weight.load_state_dict({name: stored[name] for name in representation.tensors(shape)}, assign=True)
    weight.share(stored)
    inputs = torch.randn(9, shape[1]).to(dtype)
    found = linear(weight.products(), inputs, shape[0])
    assert found.dtype == dtype
    assert error(found, inputs.double() @ weight.dense().detach().double().T) < torch.finfo(dtype).eps


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_numbers_of_any_length(dtype: torch.dtype, instructions: str) -> None:
    """A cut vector at their end counts what is in it once; a token has the same bits alone and among others."""
    for columns in (*range(1, 50), 77, 448, 447):
        generator = torch.Generator().manual_seed(columns)
        matrix, inputs = (torch.randn(rows, columns, generator=generator) for rows in (11, 4))
        own = numbers(matrix.to(dtype))
        table = Table([((own,),)], (11, columns), ())
        found = routed(table, torch.zeros(4, dtype=torch.int64), inputs)
        assert error(found, inputs.double() @ own.data.double().T) < 1e-6, columns
        for token in range(4):
            alone = routed(table, torch.zeros(1, dtype=torch.int64), inputs[token : token + 1])
            assert alone[0].equal(found[token]), (columns, token)


@torch.no_grad()
@pytest.mark.parametrize("group", [16, 48, 64, 96, 192])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_groups_of_a_trellis(bits: int, group: int, instructions: str) -> None:
    """Such as end within what is decoded at a time, alone and among others, few and many."""
    shape, generator = (32, 192), torch.Generator().manual_seed(group)
    form = parse_representation(f"trellis-weight:{bits}:{group}")
    weight = form.build(shape, torch.bfloat16, CPU)
    weight.load_state_dict(form.encode(torch.randn(shape, generator=generator), torch.bfloat16), assign=True)
    exact, inputs = weight.dense().double(), torch.randn(40, 192, generator=generator)
    table, only = Table([weight.products()], shape, weight.modules()), torch.zeros(40, dtype=torch.int64)
    found = routed(table, only, inputs)
    assert error(found, inputs.double() @ exact.T) < 1e-5
    assert error(linear(weight.products(), inputs, shape[0]), inputs.double() @ exact.T) < 1e-5
    assert routed(table, only[:1], inputs[7:8])[0].equal(found[7])


def coded(bits: int, shape: tuple[int, int], group: int, seed: int = 0) -> Operand:
    generator = torch.Generator().manual_seed(seed)
    size = (packed_size(shape[0] * shape[1], bits),)
    data = torch.randint(0, 255, size, dtype=torch.uint8, generator=generator)
    scales = torch.rand(shape[0], shape[1] // group, generator=generator)
    return Operand("codes", shape, data, scales, bits, group)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sum_is_the_sum(bits: int, dtype: torch.dtype, instructions: str) -> None:
    """Codes beside a base in the same shape, and beside two factors: at once, or one after the other."""
    shape, generator = (64, 96), torch.Generator().manual_seed(bits)
    delta = coded(bits, shape, 32)
    base = numbers(torch.randn(shape, generator=generator).to(dtype))
    u, v = torch.randn(64, 5, generator=generator).to(dtype), torch.randn(5, 96, generator=generator).to(dtype)
    inputs = torch.randn(20, 96, generator=generator).to(dtype)
    one = linear(((delta,),), inputs.float(), 64).double()
    for beside, matrix in ((((base,),), base.data), ((factors(u, v),), u.double() @ v.double())):
        expected = one + F.linear(inputs.double(), matrix.double())
        products = ((delta,), *beside)
        few = routed(Table([products], shape, ()), torch.zeros(20, dtype=torch.int64), inputs)
        assert error(few, expected) < 1e-6
        assert error(linear(products, inputs, 64), expected) < 1e-6 if dtype == torch.float32 else 6e-3


@pytest.mark.parametrize("instructions", ["native", "cooperlake"], indirect=True)
@pytest.mark.parametrize(("shape", "group"), [((264, 1056), 32), ((72, 48), 16), ((37, 1050), 25), ((1, 1), 1)])
def test_many_tokens_in_bf16(shape: tuple[int, int], group: int, instructions: str) -> None:
    """In the instructions for bf16, with AMX's where the machine has them: parts of rows, columns and tokens left over,
    every base that is added at once, and those that are not."""
    generator = torch.Generator().manual_seed(0)
    bases = [coded(bits, shape, group, 1) for bits in BITS] + [numbers(torch.randn(shape, generator=generator))]
    for bits in BITS:
        for base in (None, *bases):
            operands = [coded(bits, shape, group), *([base] if base is not None else [])]
            for tokens in (1, 33) if bits != 3 else (1, 16, 600):
                inputs = torch.randn(tokens, shape[1], generator=generator).bfloat16()
                products = tuple((operand,) for operand in operands)
                expected = linear(products, inputs.float(), shape[0]).double()
                assert error(linear(products, inputs, shape[0]), expected) < 8e-3, (bits, base, tokens)


@pytest.mark.parametrize("shape", [(64, 96), (63, 50), (40, 4096)])
@pytest.mark.parametrize("bits", [0, *BITS])
def test_bits_are_equal_alone_and_among_others_on_any_number_of_threads(
    bits: int, shape: tuple[int, int], request: pytest.FixtureRequest
) -> None:
    generator = torch.Generator().manual_seed(1)
    group = 32 if shape[1] % 32 == 0 else 25
    operands = [coded(bits, shape, group, seed) if bits else numbers(torch.randn(shape)) for seed in range(3)]
    table = Table([((operand,),) for operand in operands], shape, ())
    inputs, chosen = torch.randn(9, shape[1], generator=generator), torch.tensor([0, 2, 2, 1, 2, -1, 2, 0, 2])
    expected = routed(table, chosen, inputs)
    for token in range(9):
        assert routed(table, chosen[token : token + 1], inputs[token : token + 1])[0].equal(expected[token])
    assert not expected[5].any()
    request.getfixturevalue("two_threads")
    assert routed(table, chosen, inputs).equal(expected)
    for token in range(9):
        assert routed(table, chosen[token : token + 1], inputs[token : token + 1])[0].equal(expected[token])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", [(64, 96), (63, 50)])
def test_scales_that_are_not_finite_go_through(bits: int, shape: tuple[int, int]) -> None:
    operand = coded(bits, shape, shape[1] // 2)
    assert operand.scales is not None
    operand.scales[3, 1], operand.scales[5, 0] = torch.nan, torch.inf
    inputs = torch.randn(3, shape[1], generator=torch.Generator().manual_seed(1))
    clean = [row for row in range(shape[0]) if row not in (3, 5)]
    few = routed(Table([((operand,),)], shape, ()), torch.zeros(3, dtype=torch.int64), inputs)
    for found in (few, linear(((operand,),), inputs, shape[0])):
        assert found[:, 3].isnan().all()
        assert not found[:, 5].isfinite().any()
        assert found[:, clean].isfinite().all()


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("instructions", ["native", "x86-64", "cooperlake"], indirect=True)
def test_many_tokens_of_which_one_is_not_finite(number: float, instructions: str) -> None:
    """It spoils nobody else's products, and a group of zeros is zero for all others."""
    for bits in BITS:
        operand = coded(bits, (64, 96), 32)
        assert operand.scales is not None
        operand.scales[3] = 0
        inputs = torch.randn(40, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
        clean = linear(((operand,),), inputs, 64)
        assert not clean[:, 3].any()
        inputs[7, 50] = number
        found, others = linear(((operand,),), inputs, 64), [token for token in range(40) if token != 7]
        assert found[others].equal(clean[others])
        assert not found[7, [row for row in range(64) if row != 3]].isfinite().any()


def test_nothing_in_nothing_out() -> None:
    operand = coded(4, (64, 96), 32)
    table = Table([((operand,),), ()], (64, 96), ())
    assert routed(table, torch.zeros(0, dtype=torch.int64), torch.zeros(0, 96)).shape == (0, 64)
    assert linear(((operand,),), torch.zeros(0, 96), 64).shape == (0, 64)
    assert linear((), torch.ones(2, 96), 64).equal(torch.zeros(2, 64))
    assert routed(table, torch.tensor([1, 7, -1]), torch.ones(3, 96)).equal(torch.zeros(3, 64))
