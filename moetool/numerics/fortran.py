"""BLAS and LAPACK routines that torch does not expose, called without the GIL.

scipy's own wrappers hold the GIL for the whole call, which serialises worker threads. scipy also publishes the
addresses of the routines for Cython users (`scipy.linalg.cython_lapack`, `cython_blas`); a `ctypes` call through
such an address releases the GIL.

That BLAS is another library than torch's, with threads of its own. They spin for a while after every call, and two
pools that wait for each other's cores cost more time than the second thread saves: within a call there is one thread.
"""

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moetool.numerics.shared_setting import SharedSetting

Routine = Callable[..., object]


@cache
def routine(name: str, arguments: int) -> Routine | None:
    """The Fortran routine `name` taking `arguments` pointers, or None where scipy does not publish it.

    BLAS and LAPACK names alike ("dsyrk", "ssyevr"). Every argument is an address, as Fortran passes by reference.
    """
    try:
        from scipy.linalg import cython_blas, cython_lapack

        capsule = {**cython_lapack.__pyx_capi__, **cython_blas.__pyx_capi__}[name]
        get_name = ctypes.pythonapi.PyCapsule_GetName
        get_name.restype, get_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
        get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
        get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        address = get_pointer(capsule, get_name(capsule))
    except (ImportError, AttributeError, KeyError):  # another Python, or a scipy that dropped the tables
        return None
    return ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * arguments)(address)


def integer(value: int) -> NDArray[np.generic]:
    """Wrap an int as a Fortran INTEGER: an int32 array `[1]`, whose address a routine takes."""
    return np.array([value], dtype=np.int32)


def character(value: str) -> NDArray[np.generic]:
    """Wrap a letter as a Fortran CHARACTER*1: a writable uint8 array `[1]`, whose address a routine takes."""
    return np.frombuffer(value.encode(), dtype=np.uint8).copy()


def call(function: Routine, *arguments: NDArray[np.generic] | Tensor) -> None:
    """Call `function` on one thread with the addresses of `arguments`, which stay alive until it returns."""
    addresses = [a.data_ptr() if isinstance(a, Tensor) else a.ctypes.data for a in arguments]
    with one_thread():
        function(*addresses)


def one_thread() -> AbstractContextManager[None]:
    """Within this block scipy's OpenBLAS computes on the calling thread alone; without effect on another BLAS.

    The number is one per process.
    """
    pool = _pool()
    return nullcontext() if pool is None else pool.held_at(1)


@cache
def _pool() -> SharedSetting[int] | None:
    """The number of threads of the OpenBLAS that scipy calls; None where it calls another."""
    try:
        from scipy.linalg import cython_blas

        library = ctypes.CDLL(cython_blas.__file__)  # loaded already; symbols are looked up in what it depends on, too
    except (ImportError, OSError):
        return None
    for prefix in ("scipy_openblas", "openblas"):  # in scipy's wheels and in distributions
        try:
            get, put = library[f"{prefix}_get_num_threads"], library[f"{prefix}_set_num_threads"]
        except AttributeError:
            continue
        get.restype, get.argtypes, put.restype, put.argtypes = ctypes.c_int, [], None, [ctypes.c_int]
        return SharedSetting(get, put)
    return None
