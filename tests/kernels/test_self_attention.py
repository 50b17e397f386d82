"""Self-attention of one token in one call gives the numbers of its operations one by one."""

import itertools

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm, apply_rotary_pos_emb

from moetool.compiled.compiler import problem
from moetool.kernels import self_attention, vector
from moetool.kernels.attention import attend
from moetool.kernels.self_attention import CacheRoom, Projected, RootMeanSquare, SelfAttention
from moetool.numerics.packing import pack, unpack
from moetool.representations.operand import Operand, numbers

pytestmark = pytest.mark.skipif(bool(problem()), reason=problem())
HEADS = ((4, 4), (6, 2), (7, 1))  # of queries, and of keys
HIDDEN, LENGTHS = 70, (1, 15, 40)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def operands(heads: tuple[int, int], width: int, length: int, bias: bool) -> tuple[list[Projected], list[Tensor]]:
    """Projections; and a token, its rotation, keys and values before it."""
    torch.manual_seed(width + length)
    rows = (*(count * width for count in (heads[0], heads[1], heads[1])), 50)
    columns = (HIDDEN, HIDDEN, HIDDEN, heads[0] * width)
    made = [
        Projected(numbers(drawn(out, into)), drawn(out) if bias else None)
        for out, into in zip(rows, columns, strict=True)
    ]
    angles = torch.randn(1, 1, width // 2).repeat(1, 1, 2)
    cache = (1, heads[1], length, width)
    tensors = [
        drawn(1, 1, HIDDEN),
        angles.cos().bfloat16(),
        angles.sin().bfloat16(),
        drawn(*cache),
        drawn(*cache),
    ]
    return made, tensors


def coded(bits: int, shape: tuple[int, int], group: int, bias: bool) -> tuple[Projected, Projected]:
    """A projection in codes, and in numbers of bf16 that are exactly what these stand for."""
    (rows, columns), added = shape, drawn(shape[0]) if bias else None
    packed = pack(torch.randint(0, 2**bits, (rows * columns,), dtype=torch.uint8), bits)
    scales = torch.randint(-6, -4, (rows, columns // group)).float().exp2()
    levels = unpack(packed, bits, rows * columns).view(shape).float() - (2 ** (bits - 1) - 1)
    matrix = (levels * scales.repeat_interleave(group, 1)).bfloat16()
    operand = Operand("codes", shape, packed, scales.bfloat16(), bits, group)
    return Projected(operand, added), Projected(numbers(matrix), added)


def one_by_one(
    own: list[Projected], given: list[Tensor], norms: list[RootMeanSquare], width: int, scale: float = 0.3
) -> tuple[Tensor, ...]:
    hidden, cosine, sine, keys, values = given
    query, key, value = (
        vector.linear(hidden, part.matrix.data, part.bias).view(1, 1, -1, width).transpose(1, 2) for part in own[:3]
    )
    if norms:
        query, key = (_normed(part, norm) for part, norm in zip((query, key), norms, strict=True))
    query, key = apply_rotary_pos_emb(query, key, cosine, sine)
    keys, values = torch.cat([keys, key], 2), torch.cat([values, value], 2)
    mixed = attend(query, keys, values, None, scale).view(1, 1, -1)
    return vector.linear(mixed, own[3].matrix.data, own[3].bias), keys, values


def _normed(heads: Tensor, norm: RootMeanSquare) -> Tensor:
    made = Qwen3MoeRMSNorm(heads.shape[-1], norm.epsilon).bfloat16()
    made.weight.data = norm.weight
    return made(heads)


@torch.no_grad()
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_the_same_bits(heads: tuple[int, int], instructions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (vector, self_attention):
        monkeypatch.setattr(module, "_kernel", module._kernel.__wrapped__)  # the library is another one here
    for width, length, bias in itertools.product((32, 96), LENGTHS, (False, True)):
        own, given = operands(heads, width, length, bias)
        room = CacheRoom(*given[3:])
        output = SelfAttention(tuple(own), None, width, 0.3)(*given[:3], room)
        right, keys, values = one_by_one(own, given, [], width)
        assert output.equal(right)
        assert all(found.equal(expected) for found, expected in zip(room.held(), (keys, values), strict=True))


@torch.no_grad()
@pytest.mark.parametrize("bits", [5, 6, 8])
def test_codes(bits: int, instructions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (vector, self_attention):
        monkeypatch.setattr(module, "_kernel", module._kernel.__wrapped__)
    for heads, group, bias in itertools.product(((4, 4), (6, 2)), (16, 48), (False, True)):
        width, hidden = 32, 96
        _, given = operands(heads, width, 15, bias)
        given[0] = drawn(1, 1, hidden)
        shapes = [(count * width, hidden) for count in (heads[0], heads[1], heads[1])] + [(48, heads[0] * width)]
        both = [coded(bits, shape, 32 if shape[1] % group else group, bias) for shape in shapes]
        own, plain = [part for part, _ in both], [part for _, part in both]
        room = CacheRoom(*given[3:])
        output = SelfAttention(tuple(own), None, width, 0.02)(*given[:3], room)
        right, *cached = one_by_one(plain, given, [], width, 0.02)
        torch.testing.assert_close(output, right, rtol=0.02, atol=0.02 * right.abs().max().item())
        for found, expected in zip(room.held(), cached, strict=True):
            torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


@torch.no_grad()
@pytest.mark.parametrize("group", [32, 64, 96, 128])
@pytest.mark.parametrize("bits", [5, 6, 8])
def test_codes_beside_rounded_tokens(
    bits: int, group: int, instructions: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Tokens are rounded to whole numbers of 16 bits: next to what fp32 gives, the same on any number of threads.

    One that is not finite is not rounded.
    """
    monkeypatch.setattr(self_attention, "_kernel", self_attention._kernel.__wrapped__)
    width, heads, hidden = 64, (6, 2), 384
    _, given = operands(heads, width, 15, True)
    given[0] = drawn(1, 1, hidden)
    shapes = [(count * width, hidden) for count in (heads[0], heads[1], heads[1])] + [(1040, heads[0] * width)]
    own = [coded(bits, shape, group, True)[0] for shape in shapes]
    kernel = SelfAttention(tuple(own), None, width, 0.02)

    def run(rounds: bool) -> tuple[Tensor, ...]:
        monkeypatch.setenv("MOETOOL_KERNELS", "" if rounds else "exact")
        room = CacheRoom(*given[3:])
        return kernel(*given[:3], room), *room.held()

    exact, rounded = run(False), run(True)
    for found, expected, bound in zip(rounded, exact, (2e-2, 1e-3, 1e-3), strict=True):  # what follows bf16 is coarser
        torch.testing.assert_close(found, expected, rtol=1 / 128, atol=bound * expected.abs().max().item())
    request.getfixturevalue("two_threads")
    assert all(found.equal(expected) for found, expected in zip(run(True), rounded, strict=True))
    given[0][0, 0, 3] = torch.inf
    torch.testing.assert_close(run(True), run(False), rtol=0, atol=0, equal_nan=True)


@torch.no_grad()
def test_norms_of_heads() -> None:
    own, given = operands((6, 2), 64, 20, False)
    norms = RootMeanSquare(drawn(64), 1e-3), RootMeanSquare(drawn(64), 0.5)
    output = SelfAttention(tuple(own), norms, 64, 0.3)(*given[:3], CacheRoom(*given[3:]))
    right, _, _ = one_by_one(own, given, list(norms), 64)
    assert (output - right).float().norm() < 5e-3 * right.float().norm()


@torch.no_grad()
def test_tokens_follow_in_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_attention, "_MORE", 2)
    own, given = operands((6, 2), 32, 3, False)
    kernel, room, place = SelfAttention(tuple(own), None, 32, 0.3), CacheRoom(*given[3:]), None
    for _ in range(2):
        assert room.continues(*room.held())
        assert place in (None, room.keys.data_ptr())
        place = room.keys.data_ptr()
        right, *given[3:] = one_by_one(own, given, [], 32)
        assert kernel(*given[:3], room).equal(right)
    assert not room.continues(*room.held())  # it is full


@torch.no_grad()
def test_any_number_of_threads_gives_the_same_bits(request: pytest.FixtureRequest) -> None:
    own, given = operands((16, 4), 64, 600, True)
    kernel = SelfAttention(tuple(own), None, 64, 0.3)
    alone = kernel(*given[:3], CacheRoom(*given[3:]))
    request.getfixturevalue("two_threads")
    assert all(kernel(*given[:3], CacheRoom(*given[3:])).equal(alone) for _ in range(20))
