"""What launchers say in the environment."""

import os

import pytest

from moetool.errors import UsageError
from moetool.job.processes import (
    check_processes,
    is_first_process,
    local_processes,
    local_rank,
    processes,
    sharding,
)


@pytest.mark.parametrize(
    ("told", "count", "first"),
    [
        ({}, 1, True),
        ({"WORLD_SIZE": "4", "RANK": "0"}, 4, True),
        ({"WORLD_SIZE": "4", "RANK": "3"}, 4, False),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, 2, False),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, 2, True),
        ({"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "1"}, 2, False),
        ({"WORLD_SIZE": "4", "RANK": "0", "PMI_SIZE": "2", "PMI_RANK": "1"}, 4, True),
    ],
)
def test_who_is_who(monkeypatch: pytest.MonkeyPatch, told: dict[str, str], count: int, first: bool) -> None:
    for kind in ("WORLD_", "OMPI_COMM_WORLD_", "PMI_", "MV2_COMM_WORLD_"):
        monkeypatch.delenv(f"{kind}SIZE", raising=False)
        monkeypatch.delenv(f"{kind}RANK", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert (processes(), is_first_process()) == (count, first)


@pytest.mark.parametrize(
    ("told", "here", "place"),
    [
        ({}, 1, 0),
        ({"WORLD_SIZE": "4", "RANK": "3"}, 4, 3),
        ({"WORLD_SIZE": "4", "RANK": "3", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}, 2, 1),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, 2, 1),
    ],
)
def test_who_is_on_this_machine(monkeypatch: pytest.MonkeyPatch, told: dict[str, str], here: int, place: int) -> None:
    """All, if nobody says."""
    for name in [name for name in os.environ if name.endswith(("RANK", "SIZE"))]:
        monkeypatch.delenv(name)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert (local_processes(), local_rank()) == (here, place)


def test_processes_that_accelerate_does_not_know_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """As mpirun starts them where there are cards."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_processes(2)
    with pytest.raises(UsageError, match="2 processes were started, and accelerate knows of 1"):
        check_processes(1)


@pytest.mark.parametrize(
    ("told", "tool"),
    [
        ({}, None),
        ({"ACCELERATE_USE_FSDP": "true"}, "FSDP 1"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, "FSDP 2"),
        ({"ACCELERATE_USE_FSDP": "false"}, None),
        ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, "ZeRO 3"),
    ],
)
def test_what_is_shared(monkeypatch: pytest.MonkeyPatch, told: dict[str, str], tool: str | None) -> None:
    for name in ("ACCELERATE_USE_FSDP", "FSDP_VERSION", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_DEEPSPEED_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert sharding() == tool
