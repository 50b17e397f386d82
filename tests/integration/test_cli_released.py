"""What a layer needed is freed when the layer is over, not when the garbage collector comes by, which may be never: few
objects are made for each layer, and they may be gigabytes."""

import gc
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from sampling import sampled

from moetool.costs.layer_memory import LayerMemory
from moetool.runtime import memory

OPTIONS = (
    "d2moe --ratio 0.4",
    "d2moe --ratio 0.4 --merge regmean --refine 2",
    "hybrid --ratio 0.6",
    "hybrid --ratio 0.6 --refine 2",
    "quantize --bits 3 --rotate",
)


def in_cycles() -> list[torch.Size]:
    """Of matrices that only the garbage collector can free."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    found = [each.shape for each in gc.garbage if isinstance(each, torch.Tensor) and each.numel() >= 1024]
    gc.set_debug(0)
    gc.garbage.clear()
    return found


@pytest.mark.parametrize(
    ("options", "at_once"),
    sampled(product(OPTIONS, (None, 3)), [(OPTIONS[1], 3), (OPTIONS[3], None)]),
)
def test_nothing_of_a_layer_waits_for_the_garbage_collector(
    options: str,
    at_once: int | None,
    run_cli: Any,
    tiny_mixtral: Path,
    calibration: tuple[object, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if at_once is not None:
        monkeypatch.setattr(LayerMemory, "at_once", lambda self, allowed: at_once)
    left: list[torch.Size] = []
    give_back = memory.return_heap  # called when a layer is over

    def checked() -> None:
        give_back()
        left.extend(in_cycles())

    ours = [module for name, module in sys.modules.items() if name.startswith("moetool.")]
    for module in [each for each in ours if getattr(each, "return_heap", None) is give_back]:
        monkeypatch.setattr(module, "return_heap", checked)
    gc.collect()
    gc.disable()
    gc.freeze()  # what was there before is not looked at
    try:
        run = run_cli("compress", tiny_mixtral, tmp_path / "out", "--method", *options.split(), *calibration)
    finally:
        gc.unfreeze()
        gc.enable()
    assert run.code == 0, run.stderr
    assert left == []
