"""Bit packing and compact index sets: nothing lost, not a byte too many."""

import math

import pytest
import torch

from moetool.numerics import packing
from moetool.numerics.index_sets import are_indices, decode_indices, encode_indices, index_sizes
from moetool.numerics.packing import pack, packed_size, rows_served, unpack, unpack_rows, unpack_span

LENGTHS = [0, 1, 2, 3, 5, 7, 8, 9, 31, 64, 65, 1000, 1001]


def codes_of(count: int, bits: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(0, 1 << bits, (count,), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count", LENGTHS)
def test_unpack_is_the_inverse(bits: int, count: int) -> None:
    codes = codes_of(count, bits)
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert len(packed) == packed_size(count, bits)
    assert unpack(packed, bits, count).equal(codes)


@pytest.mark.parametrize("bits", range(1, 9))
def test_blocks_do_not_matter(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = codes_of(5003, bits)
    whole = pack(codes, bits)
    for block in (1, 7, 64):
        monkeypatch.setattr(packing, "_BLOCK", block)
        assert pack(codes, bits).equal(whole)
        assert unpack(whole, bits, 5003).equal(codes)


@pytest.mark.parametrize("bits", range(1, 9))
def test_packed_codes_have_no_gaps(bits: int) -> None:
    for count in LENGTHS:
        assert math.ceil(count * bits / 8) <= packed_size(count, bits) <= math.ceil(count * bits / 8) + 2
    assert packed_size(4096, bits) == 4096 * bits // 8


def test_layout_is_planar() -> None:
    """Byte i holds the i-th code of every stripe, the first in the lowest bits; 3 bits are 2 and then 1."""
    assert pack(torch.tensor([1, 2, 3, 4], dtype=torch.uint8), 4).tolist() == [0x31, 0x42]
    assert pack(torch.tensor([0, 1, 2, 3, 3], dtype=torch.uint8), 2).tolist() == [0b111000, 0b1101]
    assert pack(torch.tensor([1, 0, 1], dtype=torch.uint8), 1).tolist() == [0b101]
    assert pack(torch.tensor([4, 5, 6, 7], dtype=torch.uint8), 3).tolist() == [0b11100100, 0b1111]


def test_into_given_memory() -> None:
    codes = codes_of(1001, 3)
    packed = torch.full((packed_size(1001, 3),), 255, dtype=torch.uint8)
    result = torch.full((1001,), 255, dtype=torch.uint8)
    assert pack(codes, 3, packed) is packed
    assert unpack(packed, 3, 1001, result) is result
    assert result.equal(codes)


def test_nonsense() -> None:
    for bits in (0, 9, -1):
        with pytest.raises(ValueError, match="1 to 8 bits"):
            packed_size(8, bits)
    with pytest.raises(ValueError, match="packed bytes must be uint8"):
        unpack(torch.zeros(3, dtype=torch.uint8), 4, 8)
    with pytest.raises(ValueError, match="codes must be uint8"):
        pack(torch.zeros(3), 4)


@pytest.mark.parametrize("k", [0, 1, 2, 10, 100, 300, 500, 999, 1000])
def test_index_sets(k: int) -> None:
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        indices = torch.randperm(1000, generator=generator)[:k].sort().values
        packed = encode_indices(indices, 1000)
        assert {name: len(tensor) for name, tensor in packed.items()} == index_sizes(1000, k)
        assert decode_indices(packed, 1000, k).equal(indices.int())


@pytest.mark.parametrize("indices", [[0, 1, 2, 3], [996, 997, 998, 999], [0, 999], [255, 256]])
def test_index_sets_at_the_edges(indices: list[int]) -> None:
    expected = torch.tensor(indices, dtype=torch.int32)
    assert decode_indices(encode_indices(expected.long(), 1000), 1000, len(indices)).equal(expected)


def test_index_sets_are_near_the_entropy() -> None:
    n = 1 << 20
    for share in (0.01, 0.02, 0.05, 0.1, 0.2, 0.3):
        k = round(n * share)
        entropy = (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)
        size = 8 * sum(index_sizes(n, k).values())
        assert size <= min(1.2 * entropy, n, 8.6 * k)
    assert index_sizes(n, n // 2) == {"mask": n // 8}


def test_damaged_index_sets_are_noticed() -> None:
    packed = encode_indices(torch.arange(0, 1000, 10), 1000)
    packed["high"][3] ^= 1
    with pytest.raises(ValueError, match="damaged"):
        decode_indices(packed, 1000, 100)


def test_index_sets_out_of_order_are_noticed() -> None:
    """Two indices that share their high bits: only their low bits can put them in the wrong order, or make them one."""
    packed = encode_indices(torch.tensor([3, 500, 501, 999]), 1000)
    for low in (0x00, 0xFF):
        damaged = {"low": torch.full_like(packed["low"], low), "high": packed["high"]}
        with pytest.raises(ValueError, match="in ascending order and below 1000"):
            decode_indices(damaged, 1000, 4)


@pytest.mark.parametrize(
    ("indices", "good"), [([], True), ([4, 0, 2], True), ([0, 5], False), ([-1, 2], False), ([3, 1, 3], False)]
)
def test_indices_are_different_and_below_their_limit(indices: list[int], good: bool) -> None:
    assert are_indices(torch.tensor(indices, dtype=torch.int32), 5) is good


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("columns", [1, 5, 16])
def test_rows_are_unpacked_alone(bits: int, columns: int) -> None:
    rows = 6 * rows_served(bits)
    codes = codes_of(rows * columns, bits)
    packed, matrix = pack(codes, bits), codes.view(rows, columns)
    wanted = torch.tensor([rows - 1, 0, 5, 5, rows // 2])
    assert unpack_rows(packed, bits, (rows, columns), wanted).equal(matrix[wanted])
    for start in range(rows):
        for stop in range(start, rows + 1):
            found = unpack_span(lambda first, size: packed[first : first + size], bits, (rows, columns), start, stop)
            assert found.equal(matrix[start:stop])
