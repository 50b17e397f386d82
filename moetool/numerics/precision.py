"""Internal precision of fp32 matrix products on the CPU: what it is, and switches for a `with` block."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from moetool.numerics.shared_setting import SharedSetting


def _switch() -> Any:
    return torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


def _set(precision: str) -> None:
    _switch().fp32_precision = precision


_precision = SharedSetting[str](lambda: _switch().fp32_precision, _set)


def bf16_products() -> AbstractContextManager[None]:
    """Within this block fp32 matrix products on the CPU round their operands to bf16 and accumulate in fp32.

    Exact for operands that are bf16 values already. The switch is one per process, so other threads' fp32 products
    see it too.
    """
    return _precision.held_at("bf16")


def fp32_products_are_exact() -> bool:
    """False where the process allows fp32 products on the CPU with fewer bits (TF32 or bf16 operands)."""
    switch = getattr(torch.backends.mkldnn, "matmul", None)
    return getattr(switch, "fp32_precision", "ieee") in ("ieee", "none")


def has_fast_bf16() -> bool:
    """Whether the processor multiplies bf16 natively; elsewhere the bf16 switch is slower than fp32."""
    if getattr(getattr(torch.backends.mkldnn, "matmul", None), "fp32_precision", None) is None:
        return False
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, probe, bool)() for probe in probes)


def fast_products(device: torch.device) -> AbstractContextManager[object]:
    """Within this block `device` multiplies fp32 matrices in bf16 by autocast, backwards as well; a processor without
    units for bf16, on which fp32 is faster, stays with fp32."""
    if device.type == "cpu" and not has_fast_bf16():
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)
