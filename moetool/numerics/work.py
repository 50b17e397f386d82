"""Amounts of work, told apart by what their time depends on: what a plan knows before anything is measured."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Precision = Literal["bfloat16", "float32", "float64"]
PRECISIONS: tuple[Precision, ...] = ("bfloat16", "float32", "float64")


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
        return Work(**{kind: _added(own, vars(other)[kind]) for kind, own in vars(self).items()})

    def __mul__(self, times: float) -> "Work":
        return Work(**{kind: _often(own, times) for kind, own in vars(self).items()})

    __rmul__ = __mul__


def altogether(works: Iterable[Work]) -> Work:
    """Sum several amounts of work to one; no work for none."""
    return sum(works, Work())


def _added(one: Any, other: Any) -> Any:
    """The sum of two amounts of one kind, by size or precision if these are told apart."""
    if not isinstance(one, Mapping):
        return one + other
    return {key: one.get(key, 0.0) + other.get(key, 0.0) for key in {**one, **other}}


def _often(amount: Any, times: float) -> Any:
    return {key: own * times for key, own in amount.items()} if isinstance(amount, Mapping) else amount * times
