"""Matrices and factors in few bits: bytes as theory says, errors as the bits allow."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moetool.errors import InvalidInputError
from moetool.numerics.factorize import factorize, truncate, whitened_error
from moetool.numerics.output_norm import ChannelNorm, LinkedNorm, OutputNorm
from moetool.numerics.quantization import BITS
from moetool.representations import Measured, Representation, parse_representation
from moetool.representations.base import Weight
from moetool.representations.quantized import Quantized, QuantizedMatrix
from moetool.representations.quantized_low_rank import QuantizedLowRank

CPU = torch.device("cpu")
SHAPE = (24, 32)
PLAIN = [Quantized(bits, group) for bits in (8, 4, 3, 2, 1) for group in (8, 0)] + [QuantizedMatrix(4, 16)]
FACTORED = [
    QuantizedLowRank(5, 4, 8),
    QuantizedLowRank(5, 4, 12, 16),
    QuantizedLowRank(3, 1, 0),
    QuantizedLowRank(0, 2, 8),
]


def matrix(shape: tuple[int, int] = SHAPE, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def encode(representation: Representation, values: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    basis = matrix((len(values), representation.directions), seed=9)
    return representation.encode(values, dtype, Measured(basis=basis))


def loaded(representation: Representation, dtype: torch.dtype = torch.float64) -> Weight:
    weight = representation.build(SHAPE, dtype, CPU)
    weight.load_state_dict(encode(representation, matrix(), dtype), assign=True)
    return weight


def test_specs_are_what_config_json_says() -> None:
    assert Quantized(4, 128).spec == "quantised:4:128"
    assert QuantizedMatrix(3, 0).spec == "quantised-weight:3:row"
    assert QuantizedLowRank(16, 4, 64).spec == "quantised-low-rank:16:4:64"
    assert QuantizedLowRank(16, 4, 64, 96).spec == "quantised-low-rank:16:4:64:96"
    assert QuantizedLowRank(16, 4, 64, 64) == QuantizedLowRank(16, 4, 64)
    assert QuantizedLowRank(16, 4, 64, 64).spec == "quantised-low-rank:16:4:64"
    assert QuantizedLowRank(16, 4, 64, 0).spec == "quantised-low-rank:16:4:64:row"
    assert Quantized(4, 128) != QuantizedMatrix(4, 128)
    assert Quantized.uses_base
    assert QuantizedLowRank.uses_base
    assert not QuantizedMatrix.uses_base


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("quantised", "takes two arguments"),
        ("quantised:4", "takes two arguments"),
        ("quantised:7:128", "codes have 1, 2, 3, 4, 5, 6, 8 bits, not 7"),
        ("quantised:16:128", "codes have"),
        ("quantised:0:128", "codes have"),
        ("quantised:4:0", "at least one input"),
        ("quantised:4:-8", "whole numbers"),
        ("quantised:x:8", "whole numbers"),
        ("quantised:4:", "whole numbers"),
        ("quantised-weight:7:row", "codes have"),
        ("quantised-low-rank:4:128", "takes three arguments"),
        ("quantised-low-rank:-1:4:128", "takes three arguments"),
        ("quantised-low-rank:1:7:128", "codes have"),
    ],
)
def test_bad_specs(spec: str, says: str) -> None:
    with pytest.raises(InvalidInputError, match=says):
        parse_representation(spec)


@pytest.mark.parametrize(("group", "says"), [(100, "96 and 128 would"), (1000, "768 would"), (7, "6 and 8 would")])
def test_groups_must_divide(group: int, says: str) -> None:
    for representation in (Quantized(4, group), QuantizedMatrix(4, group), QuantizedLowRank(2, 4, group)):
        with pytest.raises(ValueError, match=f"groups of {group} do not divide 768 inputs; .*{says}"):
            representation.tensors((768, 768))
        with pytest.raises(ValueError, match="do not divide"):
            representation.build((768, 768), torch.bfloat16, CPU)


@pytest.mark.parametrize(
    ("group", "length", "fitting"),
    [
        *((128, 192, 96), (128, 576, 96), (128, 97, 97), (128, 128, 128), (128, 14336, 128)),
        *((20, 32, 16), (7, 768, 6), (1, 97, 1), (0, 97, 0), (128, 1, 1)),
        # Not the largest, but for vectors: as in gpt-oss and Nemotron-3; of 16; and where there are none.
        *((128, 2880, 96), (128, 1856, 64), (128, 1200, 80), (128, 230, 115), (120, 2880, 120), (100, 96, 96)),
    ],
)
def test_the_group_that_fits(group: int, length: int, fitting: int) -> None:
    assert Quantized(4, group).fitted((5, length)) == Quantized(4, fitting)
    assert QuantizedMatrix(4, group).fitted((5, length)) == QuantizedMatrix(4, fitting)
    assert QuantizedLowRank(3, 4, group).fitted((length, length)) == QuantizedLowRank(3, 4, fitting)
    Quantized(4, fitting).tensors((5, length))


def test_groups_of_one_are_taken_only_if_asked_for() -> None:
    with pytest.raises(ValueError, match="rows of 97 numbers cannot be cut into equal groups of 2 to 96; 97 would"):
        Quantized(4, 96).fitted((5, 97))
    for shape in ((97, 96), (96, 97)):
        with pytest.raises(ValueError, match="rows of 97 numbers"):
            QuantizedLowRank(3, 4, 96).fitted(shape)
    assert QuantizedLowRank(3, 4, 96).fitted((194, 192)) == QuantizedLowRank(3, 4, 2, 96)


@pytest.mark.parametrize("bits", [8, 4, 3, 2, 1])
@pytest.mark.parametrize("group", [128, 256, 0])
def test_bytes_are_those_of_theory(bits: int, group: int) -> None:
    """N k bits and one 16-bit scale per group (METHODS.md's K + N k, without the base)."""
    rows, columns = 768, 256
    expected = rows * columns * bits // 8 + 2 * rows * columns // (group or columns)
    assert Quantized(bits, group).nbytes((rows, columns), torch.bfloat16) == expected
    assert QuantizedMatrix(bits, group).nbytes((rows, columns), torch.bfloat16) == expected


def test_bytes_of_factors_are_those_of_theory() -> None:
    expected = 16 * (768 + 256) * 4 // 8 + 2 * 16 * (768 + 256) // 128
    assert QuantizedLowRank(16, 4, 128).nbytes((768, 256), torch.bfloat16) == expected


@pytest.mark.parametrize("bits", [4, 3, 2, 1])
def test_odd_sizes_are_padded_by_less_than_two_bytes(bits: int) -> None:
    codes = Quantized(bits, 0).tensors((3, 5))["codes"].shape[0]
    assert 15 * bits / 8 <= codes < 15 * bits / 8 + 2


@pytest.mark.parametrize("representation", [*PLAIN, *FACTORED])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_forward_is_the_dense_product(representation: Representation, dtype: torch.dtype) -> None:
    weight = loaded(representation, dtype)
    inputs = matrix((5, 32), seed=1).to(dtype)
    result = weight(inputs)
    assert result.dtype == dtype
    exact = inputs.double() @ weight.dense().detach().double().T
    tolerance = 1e-12 if dtype == torch.float64 else 0.03
    torch.testing.assert_close(
        result.detach().double(), exact, rtol=tolerance, atol=tolerance * float(exact.abs().max())
    )
    assert weight(inputs[:0]).shape == (0, 24)


@pytest.mark.parametrize("representation", PLAIN)
def test_forward_in_bf16_multiplies_the_rounded_matrix(representation: Representation) -> None:
    weight = loaded(representation, torch.bfloat16)
    identity = torch.eye(32, dtype=torch.bfloat16)
    assert weight(identity).T.equal(weight.dense().bfloat16())


def test_one_bit_is_the_sign_times_the_mean_magnitude() -> None:
    values = matrix()
    decoded = loaded(Quantized(1, 8)).dense()
    expected = values.sign() * values.view(24, 4, 8).abs().mean(2).repeat_interleave(8, 1)
    torch.testing.assert_close(decoded.detach(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("bits", "limit"), [(8, 0.007), (4, 0.1), (3, 0.19), (2, 0.35), (1, 0.61)])
def test_errors_fall_with_bits(bits: int, limit: float) -> None:
    values = matrix((64, 256))
    for representation in (Quantized(bits, 128), QuantizedMatrix(bits, 128)):
        decoded = representation.decode(representation.encode(values, torch.bfloat16), (64, 256), torch.bfloat16)
        assert torch.linalg.norm(decoded - values) < limit * torch.linalg.norm(values)


@pytest.mark.parametrize("representation", [*PLAIN, *FACTORED[:2]])
def test_gradients_reach_the_scales_and_nothing_else(representation: Representation) -> None:
    weight = loaded(representation)
    inputs = matrix((5, 32), seed=1)
    with torch.inference_mode():
        weight(inputs)
    weight(inputs).square().sum().backward()
    parameters = dict(weight.named_parameters())
    assert {name.split(".")[-1] for name in parameters} == {"scales"}
    for name, parameter in parameters.items():
        scale, step = parameter.detach(), 1e-6
        ends = []
        for sign in (1, -1):
            shifted = copy.deepcopy(weight)
            shifted.get_parameter(name).data[0, 0] = scale[0, 0] + sign * step
            ends.append(float(shifted(inputs).detach().square().sum()))
        assert parameter.grad is not None
        assert float(parameter.grad[0, 0]) == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-5, abs=1e-5)


def test_factors_are_refitted_to_the_quantized_u() -> None:
    """Better than to quantize the best factors one by one."""
    generator = torch.Generator().manual_seed(0)
    delta = torch.randn(64, 8, generator=generator) @ torch.randn(8, 96, generator=generator)
    delta += 0.3 * torch.randn(64, 96, generator=generator)
    u, v = truncate(delta, factorize(delta, rank=8), 8, torch.float32)
    representation = QuantizedLowRank(8, 3, 32)
    encoded = representation.encode(delta, torch.float32, Measured(basis=u))
    decoded = representation.decode(encoded, (64, 96), torch.float32)
    factor = Quantized(3, 32)
    naive_u = factor.decode(factor.encode(u.T.contiguous(), torch.float32), (8, 64), torch.float32).T
    naive_v = factor.decode(factor.encode(v, torch.float32), (8, 96), torch.float32)
    refitted = float((decoded - delta).square().sum())
    naive = float((naive_u @ naive_v - delta).square().sum())
    assert refitted < 0.97 * naive
    assert refitted > whitened_error(delta, u, v)


@pytest.mark.parametrize("linked", [False, True])
def test_the_norm_of_outputs_is_respected(linked: bool) -> None:
    """The refit is the best in the norm: it changes V unless U spans everything."""
    delta, basis = matrix((16, 32)), matrix((16, 4), seed=2)
    scale = torch.linspace(0.1, 3, 16, dtype=torch.float64)
    norm_of: OutputNorm = ChannelNorm(scale)
    if linked:
        norm_of = LinkedNorm((torch.diag(scale) + torch.triu(matrix((16, 16), seed=3).double(), 1),))
    representation = QuantizedLowRank(4, 8, 8)

    def error(norm: OutputNorm | None) -> float:
        tensors = representation.encode(delta, torch.float64, Measured(basis=basis, norm=norm))
        decoded = representation.decode(tensors, (16, 32), torch.float64)
        return float(norm_of.times(decoded - delta).square().sum())

    assert error(norm_of) < 0.99 * error(None)


def test_a_basis_of_a_lower_rank_is_refused() -> None:
    with pytest.raises(ValueError, match=r"basis must be \[24, 5\] or wider, got \[24, 4\]"):
        QuantizedLowRank(5, 4, 8).encode(matrix(), torch.float32, Measured(basis=matrix((24, 4))))


def test_rank_0_is_nothing_at_all() -> None:
    weight = QuantizedLowRank(0, 4, 8).build(SHAPE, torch.float32, CPU)
    assert not weight.state_dict()
    assert weight.dense().equal(torch.zeros(SHAPE))


@pytest.mark.parametrize("bits", BITS)
def test_products_are_the_same_with_gradients_and_without(bits: int) -> None:
    """With them the matrix is written out, without them it is multiplied tile by tile."""
    generator = torch.Generator().manual_seed(bits)
    representation = Quantized(bits, 16)
    weight = representation.build((24, 32), torch.float32, torch.device("cpu"))
    weight.load_state_dict(representation.encode(torch.randn(24, 32, generator=generator), torch.float32))
    inputs = torch.randn(5, 32, generator=generator)
    with_gradients = weight(inputs)
    with_gradients.square().sum().backward()
    assert weight.scales.grad is not None
    assert weight.scales.grad.abs().min() > 0
    with torch.no_grad():
        torch.testing.assert_close(weight(inputs), with_gradients, rtol=1e-5, atol=1e-5)
    with torch.inference_mode():
        torch.testing.assert_close(weight(inputs), with_gradients, rtol=1e-5, atol=1e-5)


def test_factors_do_not_take_their_directions_for_rows() -> None:
    """How rows of the matrix count together says nothing of the rows of V."""
    generator = torch.Generator().manual_seed(3)
    delta, inputs = torch.randn(24, 16, generator=generator), torch.randn(200, 16, generator=generator)
    form, measured = QuantizedLowRank(8, 3, 8), Measured(inputs.T @ inputs)
    plain = form.encode(delta, torch.float32, measured)
    linked = form.encode(delta, torch.float32, replace(measured, outputs=_Alike()))
    assert all(tensor.equal(linked[name]) for name, tensor in plain.items())


class _Alike:
    """A metric in which all rows tell much of each other."""

    def among(self, rows: Tensor) -> Tensor:
        return torch.eye(len(rows)) + 3
