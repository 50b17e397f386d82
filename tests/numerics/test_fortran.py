"""The threads of the BLAS that scipy brings along."""

import threading

import numpy as np
import pytest
import torch

from moetool.numerics import fortran
from moetool.numerics.gram import Gram


@pytest.fixture
def threads():
    """`threads()` is how many OpenBLAS would use now: two, before anything limits it."""
    pool = fortran._pool()
    if pool is None:
        pytest.skip("scipy calls another BLAS")
    get, put = pool.get, pool.put
    before = get()
    put(2)
    yield get
    put(before)


def test_a_call_runs_on_one_thread(threads):
    seen = []
    fortran.call(lambda address: seen.append((threads(), address)), data := np.zeros(3))
    assert seen == [(1, data.ctypes.data)]
    assert threads() == 2


def test_the_number_comes_back_after_an_exception(threads):
    def fail() -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        fortran.call(fail)
    assert threads() == 2


def test_the_last_of_several_users_restores(threads):
    entered, leave = threading.Event(), threading.Event()

    def user() -> None:
        with fortran.one_thread():
            entered.set()
            leave.wait(60)

    other = threading.Thread(target=user)
    with fortran.one_thread():
        other.start()
        assert entered.wait(60)
    assert threads() == 1, "the other is still at work"
    leave.set()
    other.join()
    assert threads() == 2


def test_sums_do_not_depend_on_the_number_of_threads(threads):
    rows = torch.randn(512, 96, generator=torch.Generator().manual_seed(0))
    first, second = Gram(96), Gram(96)
    first.add(rows)
    fortran._pool().put(1)
    second.add(rows)
    assert torch.equal(first.matrix(), second.matrix())
