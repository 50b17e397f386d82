"""`moetool` where accelerate shards models over CPU processes too, which it does over accelerators alone.

Started by `torchrun` with `ACCELERATE_USE_FSDP=true`.
"""

from typing import Any

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

from moetool.cli import main

_began = AcceleratorState.__init__


def _begin(self: Any, *arguments: Any, fsdp_plugin: Any = None, **options: Any) -> None:
    _began(self, *arguments, fsdp_plugin=fsdp_plugin, **options)
    if fsdp_plugin is not None:
        self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        self.fsdp_plugin = fsdp_plugin


if __name__ == "__main__":
    AcceleratorState.__init__ = _begin  # type: ignore[method-assign]
    main()
