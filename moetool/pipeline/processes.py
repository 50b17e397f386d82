"""Which of several processes this is, by what `accelerate launch` and `torchrun` tell it."""

import os


def processes() -> int:
    """How many work on the job."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def shards_model() -> str | None:
    """The tool by which a launcher wants every process to hold a part of the model only, if it does."""
    tools = {"ACCELERATE_USE_FSDP": "FSDP", "ACCELERATE_USE_DEEPSPEED": "DeepSpeed"}
    return next((tool for name, tool in tools.items() if os.environ.get(name, "").lower() in ("1", "true")), None)


def is_first_process() -> bool:
    """Whether this is the one that reads options, writes results and talks."""
    return int(os.environ.get("RANK", "0")) == 0
