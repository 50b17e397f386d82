"""Amounts of work add up."""

import pytest

from moetool.costs.phases import Phase
from moetool.numerics.work import Work, altogether

SOME = Work({"float32": 3.0}, {4: 1.0}, {8: 2.0}, moved=5.0, calls=7.0, hashed=11.0, read=13.0, written=17.0)
MORE = Work({"float32": 1.0, "bfloat16": 2.0}, {4: 1.0, 5: 1.0}, moved=1.0)


def test_sums_are_by_kind_and_size() -> None:
    total = SOME + MORE
    assert total.products == {"float32": 4.0, "bfloat16": 2.0}
    assert (total.eigen, total.cholesky) == ({4: 2.0, 5: 1.0}, {8: 2.0})
    assert (total.moved, total.calls, total.hashed, total.read, total.written) == (6.0, 7.0, 11.0, 13.0, 17.0)


def test_often_is_a_sum() -> None:
    assert SOME * 3 == 3 * SOME == SOME + SOME + SOME == altogether([SOME] * 3)
    assert altogether([]) == Work()


def test_phases_are_told_apart_by_name() -> None:
    assert Phase("Write", SOME) != Phase("Read", SOME)
    with pytest.raises(AttributeError):
        SOME.moved = 1.0  # type: ignore[misc]
