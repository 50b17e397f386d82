"""Lets accelerate shard models over CPU processes too, which it does over accelerators alone. Not a test."""

from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

_begin = AcceleratorState.__init__


def _begin_sharded(self: Any, *arguments: Any, fsdp_plugin: Any = None, **options: Any) -> None:
    _begin(self, *arguments, fsdp_plugin=fsdp_plugin, **options)
    if fsdp_plugin is not None:
        if self.mixed_precision != "no":
            fsdp_plugin.set_mixed_precision(self.mixed_precision)
        self.fsdp_plugin = fsdp_plugin
        PartialState._shared_state["distributed_type"] = self.distributed_type = DistributedType.FSDP
        self.device = torch.device("cpu")  # without the index that FSDP 1 does not expect


def shard_on_processors() -> None:
    """From now on, in this process."""
    AcceleratorState.__init__ = _begin_sharded  # type: ignore[method-assign]
