"""Which internal precision fp32 matrix products use on the CPU, and what the processor can do."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_lock = threading.Lock()
_users = 0
_before = "none"


@contextmanager
def bf16_products() -> Iterator[None]:
    """Within this block fp32 matrix products on the CPU round their operands to bf16 and accumulate in fp32.

    Exact for operands that are bf16 values already. The switch is one per process, so other threads' fp32 products
    see it too; the last of several concurrent users restores it, also after an exception.
    """
    global _users, _before
    switch: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    with _lock:
        if _users == 0:
            _before = switch.fp32_precision
            switch.fp32_precision = "bf16"
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                switch.fp32_precision = _before


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
