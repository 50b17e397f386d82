"""Codes and scales of blocks by the C++ of `compiled` (`descent.cpp`), for matrices on a processor."""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from moetool.compiled import compiler
from moetool.export.blocks.lattice import list_of, neighbors_of
from moetool.format.blocks import BlockLayout

_CPU = torch.device("cpu")
_MOST = 256  # numbers in a block
_UNITS = (torch.float32, torch.bfloat16, torch.float16)


def runs_on(kind: BlockLayout, numbers: Tensor) -> bool:
    """Whether there is compiled code for a matrix in blocks of this kind where it lies."""
    return numbers.device == _CPU and kind.numbers <= _MOST and not compiler.problem()


def descend(kind: BlockLayout, numbers: Sequence[Tensor], gram: Tensor, image: Tensor) -> None:
    """Improve the blocks of a span once, all their numbers, as `plain_descent.descend`."""
    compiler.library().moetool_descend(
        ctypes.byref(_described(kind)),
        ctypes.byref(_Span(*image.shape, _at(gram), gram.stride(0), *map(_at, (image, *numbers)))),
        ctypes.c_int(compiler.threads()),
    )


def feed_back(
    kind: BlockLayout,
    factor: Tensor,
    moved: Tensor,
    groups: Tensor,
    scales: Tensor,
    minima: Tensor,
    errors: Tensor,
    codes: Tensor,
) -> None:
    """Choose the codes of some inputs, as `feeding.feed_back`."""
    parts = [moved, groups, scales, minima, errors, codes]
    compiler.library().moetool_feed_back(
        ctypes.byref(_described(kind)),
        ctypes.byref(_Run(*errors.shape, _at(factor), factor.stride(0), *map(_at, parts))),
        ctypes.c_int(compiler.threads()),
    )


def fit_scales(kind: BlockLayout, inputs: Tensor, energy: Tensor, clips: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Find scales and minima `[groups, out]` that suit the nearest codes, as `blocked.fit_scales`."""
    columns, rows = inputs.shape
    scale, minimum = inputs.new_empty(2, columns // kind.group, rows)
    tried, energy = torch.tensor(clips), energy.float().contiguous()
    own = _Fit(columns, rows, _at(inputs), _at(energy), _at(tried), len(clips), _at(scale), _at(minimum))
    compiler.library().moetool_fit_scales(
        ctypes.byref(_described(kind)), ctypes.byref(own), ctypes.c_int(compiler.threads())
    )
    return scale, minimum


def nearest_points(kind: BlockLayout, places: Tensor) -> Tensor:
    """Codes of points near to places `[…, in, out]` fp32, uint8."""
    places = places.contiguous()
    codes = torch.empty_like(places, dtype=torch.uint8)
    columns, rows = places.flatten(0, -2).shape
    compiler.library().moetool_nearest_points(
        ctypes.byref(_described(kind)),
        _at(places),
        ctypes.c_long(columns),
        ctypes.c_long(rows),
        _at(codes),
        ctypes.c_int(compiler.threads()),
    )
    return codes


def _at(numbers: Tensor) -> ctypes.c_void_p:
    assert numbers.shape[-1] <= 1 or numbers.stride(-1) == 1
    return ctypes.c_void_p(numbers.data_ptr())


def _fields(names: str, kind: Any) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class _Type(ctypes.Structure):
    _fields_ = [
        *_fields("numbers group count", ctypes.c_int64),
        *_fields("levels", ctypes.c_void_p),
        *_fields("is_even together has_even_signs tried", ctypes.c_int64),
        *_fields("points neighbors", ctypes.c_void_p),
        *_fields("scale_low scale_high scale_step minimum_low minimum_high", ctypes.c_float),
        *_fields("has_minimum unit", ctypes.c_int64),
        *_fields("largest_unit", ctypes.c_float),
    ]


class _Fit(ctypes.Structure):
    _fields_ = [
        *_fields("columns rows", ctypes.c_long),
        *_fields("inputs weights clips", ctypes.c_void_p),
        *_fields("tried", ctypes.c_long),
        *_fields("scales minima", ctypes.c_void_p),
    ]


class _Span(ctypes.Structure):
    _fields_ = [
        *_fields("width rows", ctypes.c_long),
        *_fields("gram", ctypes.c_void_p),
        *_fields("stride", ctypes.c_long),
        *_fields("image codes scales minima d dmin", ctypes.c_void_p),
    ]


class _Run(ctypes.Structure):
    _fields_ = [
        *_fields("columns rows", ctypes.c_long),
        *_fields("factor", ctypes.c_void_p),
        *_fields("stride", ctypes.c_long),
        *_fields("moved groups scales minima errors codes", ctypes.c_void_p),
    ]


@cache
def _described(kind: BlockLayout) -> _Type:
    levels = torch.tensor(kind.levels, dtype=torch.float32)
    points = neighbors = torch.empty(0, 0, dtype=torch.int32)
    if kind.is_lattice:
        points = list_of(kind, _CPU)[0].to(torch.uint8).view(torch.int32).contiguous()
        neighbors = neighbors_of(kind, _CPU).int().contiguous()
    found = _Type(
        *(kind.numbers, kind.group, len(levels), _at(levels)),
        *(kind.is_even, kind.together, kind.has_even_signs, neighbors.shape[1], _at(points), _at(neighbors)),
        *(*kind.scale_range, kind.scale_step, *kind.minimum_range, kind.has_minimum),
        *(_UNITS.index(kind.unit), torch.finfo(kind.unit).max),
    )
    found.kept = levels, points, neighbors  # as long as the addresses are used
    return found
