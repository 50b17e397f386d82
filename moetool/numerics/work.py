"""Amounts of work, told apart by what their time depends on: what a plan knows before anything is measured."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

# "widened" products are fp32's of numbers that bf16 holds, for which a processor may have something faster than fp32;
# "coarse" ones may round what they multiply to bf16, and do where that is faster than fp32.
Precision = Literal["bfloat16", "float32", "float64", "widened", "coarse"]
PRECISIONS: tuple[Precision, ...] = ("bfloat16", "float32", "float64")
TIMED_PRECISIONS: tuple[Precision, ...] = (*PRECISIONS, "widened")
SizeT = TypeVar("SizeT", int, Precision)


@dataclass(frozen=True)
class Work:
    """Amount of work in a part of a job. Amounts can be added, and multiplied by a number of repetitions.

    Attributes:
        products: multiply-adds of matrix products, by the precision they are done in.
        eigen: by n, how many symmetric n × n matrices in fp64 are decomposed into all their eigenpairs.
        cholesky: by n, how many n × n matrices in fp64 are decomposed into Cholesky factors.
        moved: bytes that element-wise operations read and write in memory.
        calls: operations of torch that are started; each takes some microseconds, however small its tensors.
        hashed: bytes that go through SHA-256.
        read: bytes from disk.
        written: bytes to disk.
    """

    products: Mapping[Precision, float] = field(default_factory=dict)
    eigen: Mapping[int, float] = field(default_factory=dict)
    cholesky: Mapping[int, float] = field(default_factory=dict)
    moved: float = 0.0
    calls: float = 0.0
    hashed: float = 0.0
    read: float = 0.0
    written: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            products=_added(self.products, other.products),
            eigen=_added(self.eigen, other.eigen),
            cholesky=_added(self.cholesky, other.cholesky),
            moved=self.moved + other.moved,
            calls=self.calls + other.calls,
            hashed=self.hashed + other.hashed,
            read=self.read + other.read,
            written=self.written + other.written,
        )

    def __mul__(self, times: float) -> "Work":
        return Work(
            products=_scaled(self.products, times),
            eigen=_scaled(self.eigen, times),
            cholesky=_scaled(self.cholesky, times),
            moved=self.moved * times,
            calls=self.calls * times,
            hashed=self.hashed * times,
            read=self.read * times,
            written=self.written * times,
        )

    __rmul__ = __mul__


def altogether(works: Iterable[Work]) -> Work:
    """Sum several amounts of work to one; no work for none."""
    return sum(works, Work())


def _added(one: Mapping[SizeT, float], other: Mapping[SizeT, float]) -> dict[SizeT, float]:
    return {key: one.get(key, 0.0) + other.get(key, 0.0) for key in {**one, **other}}


def _scaled(amounts: Mapping[SizeT, float], times: float) -> dict[SizeT, float]:
    return {key: own * times for key, own in amounts.items()}
