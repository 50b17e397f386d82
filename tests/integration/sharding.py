"""`moetool` where accelerate shards models over CPU processes too, which it does over accelerators alone. Not a test: a
script that tests start by `torchrun` with `ACCELERATE_USE_FSDP=true`.

Where `KILLED_AT` is part of the path of a file or directory, a process is killed as soon as it begins to write that.
"""

import os
import signal
import sys
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

from moetool.cli import main

_begin = AcceleratorState.__init__


def _begin_sharded(self: Any, *arguments: Any, fsdp_plugin: Any = None, **options: Any) -> None:
    _begin(self, *arguments, fsdp_plugin=fsdp_plugin, **options)
    if fsdp_plugin is not None:
        if self.mixed_precision != "no":
            fsdp_plugin.set_mixed_precision(self.mixed_precision)
        self.fsdp_plugin = fsdp_plugin
        PartialState._shared_state["distributed_type"] = self.distributed_type = DistributedType.FSDP
        self.device = torch.device("cpu")  # without the index that FSDP 1 does not expect


def _die(event: str, arguments: tuple[Any, ...]) -> None:
    is_write = event == "os.mkdir" or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR))
    if is_write and os.environ["KILLED_AT"] in str(arguments[0]):
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if "KILLED_AT" in os.environ:
        sys.addaudithook(_die)
    AcceleratorState.__init__ = _begin_sharded  # type: ignore[method-assign]
    main()
