"""BLAS and LAPACK routines that torch does not expose, called without the GIL.

scipy's own wrappers hold the GIL for the whole call, which serialises worker threads. scipy also publishes the
addresses of the routines for Cython users (`scipy.linalg.cython_lapack`, `cython_blas`); a `ctypes` call through
such an address releases the GIL.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from torch import Tensor

Routine = Callable[..., Any]


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


def integer(value: int) -> np.ndarray[Any, Any]:
    """A Fortran INTEGER that can be passed by reference."""
    return np.array([value], dtype=np.int32)


def character(value: str) -> np.ndarray[Any, Any]:
    """A Fortran CHARACTER*1 that can be passed by reference."""
    return np.frombuffer(value.encode(), dtype=np.uint8).copy()


def call(function: Routine, *arguments: np.ndarray[Any, Any] | Tensor) -> None:
    """Call `function` with the addresses of `arguments`, which stay alive until it returns."""
    function(*(a.data_ptr() if isinstance(a, Tensor) else a.ctypes.data for a in arguments))
