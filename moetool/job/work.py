"""Amounts of work, told apart by what their time depends on: what a plan knows before anything is measured."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

Precision = Literal["bfloat16", "float32", "float64"]
PRECISIONS: tuple[Precision, ...] = ("bfloat16", "float32", "float64")

CountedT = TypeVar("CountedT", int, Precision)


@dataclass(frozen=True)
class Work:
    """What some part of a job does. Works add up, and are multiplied by how often they are done.

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
            _added(self.products, other.products),
            _added(self.eigen, other.eigen),
            _added(self.cholesky, other.cholesky),
            self.moved + other.moved,
            self.calls + other.calls,
            self.hashed + other.hashed,
            self.read + other.read,
            self.written + other.written,
        )

    def __mul__(self, times: float) -> "Work":
        return Work(
            {precision: count * times for precision, count in self.products.items()},
            {n: count * times for n, count in self.eigen.items()},
            {n: count * times for n, count in self.cholesky.items()},
            self.moved * times,
            self.calls * times,
            self.hashed * times,
            self.read * times,
            self.written * times,
        )

    __rmul__ = __mul__


@dataclass(frozen=True)
class Phase:
    """A part of a job that its progress shows under that name."""

    name: str
    work: Work


def altogether(works: Iterable[Work]) -> Work:
    """The sum of them all."""
    return sum(works, Work())


def _added(left: Mapping[CountedT, float], right: Mapping[CountedT, float]) -> dict[CountedT, float]:
    total: Counter[CountedT] = Counter()
    for counts in (left, right):
        for kind, count in counts.items():
            total[kind] += count  # type: ignore[assignment]  # Counter adds any numbers
    return dict(total)
