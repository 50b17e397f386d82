"""Rank and number of processes, from the environment that `torchrun`, `accelerate launch` and `mpirun` set."""

import os

from moetool.errors import UsageError

_MPI = ("PMI_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_")


def processes() -> int:
    """Number of processes that the launcher has started for the job (torchrun or MPI); 1 without a launcher."""
    return _told("WORLD_SIZE", *(f"{kind}SIZE" for kind in _MPI), otherwise=1)


def check_processes(known: int) -> None:
    """Raise `UsageError` unless accelerate knows of as many: each would train by itself and write to the same place."""
    if known != processes():
        raise UsageError(
            f"{processes()} processes were started, and accelerate knows of {known}: start them with torchrun or "
            "accelerate launch."
        )


def sharding() -> str | None:
    """Name of the scheme by which each process holds a part of a training (`FSDP 2`, `ZeRO 3` …), `None` without."""
    if _is_set("ACCELERATE_USE_FSDP"):
        return f"FSDP {os.environ.get('FSDP_VERSION', '1')}"
    return f"ZeRO {_zero_stage()}" if _is_set("ACCELERATE_USE_DEEPSPEED") else None


def _is_set(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true")


def _zero_stage() -> str:
    file = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if file == "none":
        return os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    from accelerate.utils.deepspeed import HfDeepSpeedConfig

    return str(HfDeepSpeedConfig(file).get_value("zero_optimization.stage", 0))


def rank() -> int:
    """Rank of this process among all processes of the job, from 0."""
    return _told("RANK", *(f"{kind}RANK" for kind in _MPI), otherwise=0)


def is_first_process() -> bool:
    """Whether this is the process that reads options, writes results and prints."""
    return rank() == 0


def local_processes() -> int:
    """The number of processes on this machine: all, unless the launcher says otherwise."""
    return _told("LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", *(f"{kind}LOCAL_SIZE" for kind in _MPI), otherwise=processes())


def local_rank() -> int:
    """Rank of this process among those on its machine, from 0, by which it picks its card."""
    return _told("LOCAL_RANK", "MPI_LOCALRANKID", *(f"{kind}LOCAL_RANK" for kind in _MPI), otherwise=rank())


def _told(*names: str, otherwise: int) -> int:
    return int(next((os.environ[name] for name in names if name in os.environ), otherwise))
