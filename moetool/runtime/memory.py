"""Free memory, its limits, and switches that give freed memory back to the system."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import torch

_GROUPS, _MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# Version of control groups → limit, use, and which counts of `memory.stat` the kernel can take back.
_GROUP_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
    2: ("memory.max", "memory.current", ("active_file", "inactive_file")),
}
_ONE_BY_ONE = "HF_DEACTIVATE_ASYNC_LOAD"  # by which transformers reads no tensor before it has a place

# Of glibc's malloc.h, and what its dynamic thresholds grow to by themselves.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_GROWN_TRIM, _GROWN_MMAP = 64 << 20, 32 << 20
_EAGER_MMAP = 4 << 20

# How many programs for products of 16 bits oneDNN keeps, and how many torch's own layer above it.
_PROGRAMS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32", "LRU_CACHE_CAPACITY": "32"}

_eager = 0  # how many want large blocks back at once


def free_bytes(device: torch.device | str | None = None) -> int:
    """Bytes that can still be allocated: on a card, or (any other device, or `None`) in the memory of the machine, as
    far as the control groups of this process allow."""
    if device is not None and torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    left = group_free_bytes()
    available = int(psutil.virtual_memory().available)
    return available if left is None else min(available, left)


def spread_bytes() -> int:
    """Bytes that are free on all cards and in the machine's memory, over which a device map spreads a model."""
    return free_bytes() + sum(free_bytes(f"cuda:{card}") for card in range(torch.cuda.device_count()))


def total_bytes() -> int:
    """Bytes of memory that this process could have if nothing else ran: of the machine, as far as its control groups
    allow. Unlike `free_bytes` the same whenever it is asked for."""
    limits = [
        allowed for group, version in _control_groups(_GROUPS, _MEMBERSHIP) if (allowed := _limit(group, version))
    ]
    return min([int(psutil.virtual_memory().total), *limits])


def group_free_bytes(groups: Path = _GROUPS, membership: Path = _MEMBERSHIP) -> int | None:
    """Bytes left of the limits that control groups (of a container, a batch job) set this process; `None` without one.

    Page cache that can be dropped counts as free. Both versions of control groups are known.
    """
    left = [_left(group, version) for group, version in _control_groups(groups, membership)]
    return min((free for free in left if free is not None), default=None)


def _control_groups(groups: Path, membership: Path) -> Iterator[tuple[Path, int]]:
    """Directories of the groups that this process is in, and of those above, with the version of each."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if controllers == "":
            version, roots = 2, [groups, groups / "unified"]
        elif "memory" in controllers.split(","):
            version, roots = 1, [groups / "memory"]
        else:
            continue
        for root in roots:
            own = root / path.strip("/")  # absent in a container, which sees its own group as the root
            above = [own, *own.parents]
            yield from ((group, version) for group in above[: above.index(root) + 1])


def _limit(group: Path, version: int) -> int | None:
    try:
        allowed = (group / _GROUP_FILES[version][0]).read_text().strip()
        return None if allowed == "max" else int(allowed)
    except (OSError, ValueError):
        return None


def _left(group: Path, version: int) -> int | None:
    _, use, droppable = _GROUP_FILES[version]
    if (allowed := _limit(group, version)) is None:
        return None
    try:
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        kept = int((group / use).read_text()) - sum(int(counts.get(name, 0)) for name in droppable)
        return max(0, allowed - max(0, kept))
    except (OSError, ValueError):
        return None


@contextmanager
def sparing_memory() -> Iterator[None]:
    """Have transformers load tensors one by one, and return what it frees at once, for the time of a `with` block.

    By default threads read ahead of the tensors that are put together, and glibc keeps the pieces: a model of 1.5 GB
    took 2.4 GB while it was loaded in another dtype than its own, and kept 2.3.
    """
    before = os.environ.get(_ONE_BY_ONE)
    os.environ[_ONE_BY_ONE] = "1"
    try:
        with returning_memory():
            yield
    finally:
        if before is None:
            os.environ.pop(_ONE_BY_ONE, None)
        else:
            os.environ[_ONE_BY_ONE] = before


@contextmanager
def returning_memory() -> Iterator[None]:
    """Give memory freed in a `with` block back to the system (`return_freed_memory`)."""
    _return_eagerly(1)
    try:
        yield
    finally:
        _return_eagerly(-1)
        return_heap()


def return_freed_memory() -> None:
    """Have glibc give large blocks back to the system as soon as they are freed, from now on.

    By default it learns to keep blocks of up to 32 MB, which is the size of the matrices that are worked on here one
    after the other, and the process grows by what it no longer uses. Does nothing on other C libraries.
    """
    _return_eagerly(1)


def keep_few_programs() -> None:
    """Have oneDNN forget how products of 16 bits were computed, but the last few, if it has computed none yet.

    It writes a program for every new shape and keeps a thousand of them, of .7 MB each. Where every expert is given
    another number of tokens and every delta has a rank of its own none is used again: 256 experts of .4 M parameters
    took 1085 MB, and 797 without. Users who have set the environment's variables themselves keep them.
    """
    for variable, count in _PROGRAMS.items():
        os.environ.setdefault(variable, count)


def _return_eagerly(change: int) -> None:
    """One more, or one less, who wants that; without any, blocks are kept as if glibc had learnt to."""
    global _eager
    _eager += change
    _glibc("mallopt", _MMAP_THRESHOLD, _EAGER_MMAP if _eager else _GROWN_MMAP)
    if not _eager:
        _glibc("mallopt", _TRIM_THRESHOLD, _GROWN_TRIM)


def return_heap() -> None:
    """Give what is free inside glibc's heap back to the system.

    Matrices below the size that `return_freed_memory` names lie in the heap between longer-lived small objects, and
    what they leave never fits the next layer's quite: without this the heap grows with every layer, although what is
    in use does not. Takes milliseconds. Does nothing on other C libraries.
    """
    _glibc("malloc_trim", 0)


def _glibc(function: str, *arguments: int) -> None:
    with suppress(OSError, AttributeError, TypeError):
        getattr(ctypes.CDLL(None), function)(*arguments)
