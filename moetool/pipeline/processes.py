"""Which of several processes this is, by what `accelerate launch` and `torchrun` tell it."""

import os


def processes() -> int:
    """How many work on the job."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_process() -> bool:
    """Whether this is the one that reads options, writes results and talks."""
    return int(os.environ.get("RANK", "0")) == 0
