"""Speeds of this machine, measured in two or three seconds and kept in the user's cache."""

import hashlib
import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, TypeVar

import psutil
import torch
from pydantic import Field, TypeAdapter

from moetool.compiled.compiler import cache_directories
from moetool.numerics.precision import bf16_products, has_fast_bf16
from moetool.numerics.work import PRECISIONS, TIMED_PRECISIONS, Precision, Work
from moetool.runtime.memory import free_bytes

_PRODUCT = {"cpu": 1024, "cuda": 4096}  # size of the matrices that are multiplied
_SOLVED = {"cpu": (96, 384), "cuda": (256, 1024)}
_MOVED = {"cpu": 1 << 20, "cuda": 1 << 28}  # bytes of an operand that is passed over: in a cache, on a card in memory
_COPIED = {"cpu": 1 << 27, "cuda": 1 << 29}  # bytes that no cache holds
_HASHED = 1 << 22
_DISK = 1 << 25  # bytes that are written and read at most
_SECONDS = 0.1  # that each kind of work may take, once it has been done twice
_BUSY, _PASSING = 20, 3600  # per cent of the processors that others use; seconds that speeds beside them are kept for
_FASTEST = 1e12  # bytes per second: what a clock that saw no time pass is taken to have seen


Measure = Annotated[float, Field(gt=0, allow_inf_nan=False)]
BySize = Annotated[dict[int, Measure], Field(min_length=1)]


@dataclass(frozen=True, kw_only=True)
class DeviceSpeeds:
    """Speeds of the device that computes, and of memory.

    Attributes:
        products: multiply-adds per second, by precision.
        eigen: by n, seconds of one eigen-decomposition of an n × n matrix in fp64.
        cholesky: the same for Cholesky factors.
        moved, hashed: bytes per second.
        call: seconds that it takes to start one small operation.
    """

    products: Annotated[dict[Precision, Measure], Field(min_length=len(TIMED_PRECISIONS))]
    eigen: BySize
    cholesky: BySize
    moved: Measure
    hashed: Measure
    call: Measure


@dataclass(frozen=True, kw_only=True)
class DiskSpeeds:
    """Throughput of the disk that holds an output, in bytes per second, for reading and for writing."""

    read: Measure
    written: Measure


SpeedsT = TypeVar("SpeedsT", DeviceSpeeds, DiskSpeeds)


@dataclass(frozen=True, kw_only=True)
class Machine(DeviceSpeeds, DiskSpeeds):
    """Measured speeds of this machine, by which amounts of `Work` are turned into seconds."""

    def seconds(self, work: Work) -> float:
        """The seconds that some work takes, its kinds one after the other."""
        return math.fsum(self.seconds_by_kind(work).values())

    def _speed(self, precision: Precision) -> float:
        """The speed of matrix products in a precision, in multiply-adds per second."""
        if precision == "coarse":
            return max(self.products["bfloat16"], self.products["float32"])
        return self.products[precision]

    def seconds_by_kind(self, work: Work) -> dict[str, float]:
        """Estimate the seconds that work takes, by field of `Work`; their sum is the time if nothing overlaps."""
        return {
            "products": sum(count / self._speed(precision) for precision, count in work.products.items()),
            "eigen": sum(count * _between(self.eigen, n) for n, count in work.eigen.items()),
            "cholesky": sum(count * _between(self.cholesky, n) for n, count in work.cholesky.items()),
            "moved": work.moved / self.moved,
            "calls": work.calls * self.call,
            "hashed": work.hashed / self.hashed,
            "read": work.read / self.read,
            "written": work.written / self.written,
        }


def this_machine(device: torch.device, output: Path) -> Machine:
    """The speeds of this machine's device and of the disk that `output` will be on, measured once and then remembered.

    `MOETOOL_MEASURE=again` measures again, `MOETOOL_MEASURE=off` refuses to.

    Raises:
        OSError: nothing can be written beside the output, so that the disk cannot be measured, or measuring is off.
    """
    wish = os.environ.get("MOETOOL_MEASURE", "").lower()
    if wish in {"0", "off", "no"}:
        raise OSError("MOETOOL_MEASURE=off is set")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    here = [platform.node(), platform.machine(), os.cpu_count(), torch.__version__, torch.get_num_threads()]
    there = next(parent for parent in (output.absolute(), *output.absolute().parents) if parent.is_dir())
    again = wish == "again"
    found = _kept(DeviceSpeeds, [*here, device.type, name], lambda: measured_speeds(device), again=again)
    disk = _kept(DiskSpeeds, [platform.node(), "disk", there.stat().st_dev], lambda: measured_disk(there), again=again)
    return Machine(**vars(found), **vars(disk))


def _between(seconds: Mapping[int, float], n: int) -> float:
    """The seconds of size `n`, interpolated linearly between the logarithms of those that were measured and
    extrapolated by the cube of the size."""
    sizes = sorted(seconds)
    if n >= sizes[-1]:
        return seconds[sizes[-1]] * (n / sizes[-1]) ** 3
    low, high = next((pair for pair in pairwise(sizes) if n < pair[1]), (sizes[0], sizes[0]))
    if low == high:
        return seconds[low] * (n / low) ** 3
    power = math.log(seconds[high] / seconds[low]) / math.log(high / low)
    return seconds[low] * (max(n, 1) / low) ** power


# Measuring.


def measured_speeds(device: torch.device) -> DeviceSpeeds:
    """Measure how fast a device multiplies, factorizes, decomposes and moves memory."""
    kind = "cuda" if device.type == "cuda" else "cpu"
    eigen: dict[int, float] = {}
    cholesky: dict[int, float] = {}
    n = _PRODUCT[kind]

    def multiplied(precision: Precision) -> float:
        square = torch.ones(n, n, dtype=getattr(torch, precision), device=device)
        # The second one turned round, as linear layers have it.
        return n**3 / _least_seconds(partial(torch.mm, square, square.T), device)

    products = {precision: multiplied(precision) for precision in PRECISIONS}
    products["widened"] = products["float32"]
    if kind == "cpu" and has_fast_bf16():
        with bf16_products():
            products["widened"] = multiplied("float32")
    for n in _SOLVED[kind]:
        matrix = torch.randn(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(device)
        gram = matrix @ matrix.T + torch.eye(n, dtype=torch.float64, device=device)
        eigen[n] = _least_seconds(partial(torch.linalg.eigh, gram), device)
        cholesky[n] = _least_seconds(partial(torch.linalg.cholesky, gram), device)
    wide = torch.ones(_MOVED[kind] // 4, device=device)
    into = torch.empty_like(wide)
    moved = 3 * _MOVED[kind] / _least_seconds(partial(torch.add, wide, wide, out=into), device)
    small = torch.ones(8, device=device)
    call = _least_seconds(partial(_often, small), device) / 1000
    data = bytes(_HASHED)
    hashed = _HASHED / _least_seconds(lambda: hashlib.sha256(data).digest(), device)
    return DeviceSpeeds(products=products, eigen=eigen, cholesky=cholesky, moved=moved, hashed=hashed, call=call)


def copy_bandwidth(device: torch.device) -> float | None:
    """Bytes per second that a device reads and writes together while it copies memory, by torch's present number of
    threads; `None` if there is no room for the two blocks. Measured once per process."""
    if free_bytes(device) < 4 * _COPIED["cuda" if device.type == "cuda" else "cpu"]:
        return None
    return _copy_bandwidth(device, torch.get_num_threads())


@cache
def _copy_bandwidth(device: torch.device, threads: int) -> float:
    size = _COPIED["cuda" if device.type == "cuda" else "cpu"]
    source = torch.ones(size, dtype=torch.uint8, device=device)
    into = torch.empty_like(source)
    return 2 * size / _least_seconds(partial(into.copy_, source), device)


def _often(small: torch.Tensor) -> None:
    for _ in range(500):
        small.mul(2.0).add(1.0)


def _least_seconds(run: Callable[[], object], device: torch.device) -> float:
    """The least seconds of several runs after the first: as if nothing else were running. A single thread is timed by a
    clock of its own, which stands still while other processes run."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if alone else time.perf_counter
    seconds: list[float] = []
    began = time.perf_counter()
    while len(seconds) < 3 or time.perf_counter() - began < _SECONDS:
        start = clock()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(clock() - start)
    return max(min(seconds[1:]), 1e-9)


def measured_disk(directory: Path) -> DiskSpeeds:
    """Measure how fast a small file is written until it is on the disk, and read from there, in bytes per second.

    Raises:
        OSError: none can be written there.
    """
    part = os.urandom(1 << 20)
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        began = time.perf_counter()
        written = file.write(part)
        while written < _DISK and time.perf_counter() - began < 3 * _SECONDS:
            written += file.write(part)
        os.fsync(file.fileno())
        seconds = time.perf_counter() - began
        with suppress(AttributeError, OSError):  # else it is read from memory
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        began = time.perf_counter()
        while file.read(len(part)):
            pass
        reading = time.perf_counter() - began
    read, wrote = (min(written / max(took, 1e-9), _FASTEST) for took in (reading, seconds))
    return DiskSpeeds(read=read, written=wrote)


# Remembering.


def _kept(kind: type[SpeedsT], key: Sequence[object], measure: Callable[[], SpeedsT], *, again: bool) -> SpeedsT:
    """The speeds that were measured under that key before, or are measured now; those of a busy machine count for an
    hour."""
    name = f"machine-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:20]}.json"
    passing = f"busy-{name}"
    for folder in () if again else cache_directories():
        for file, longest in ((folder / name, math.inf), (folder / passing, _PASSING)):
            with suppress(OSError, ValueError):  # pydantic's errors are of the second kind
                if time.time() - file.stat().st_mtime < longest:
                    return TypeAdapter(kind).validate_json(file.read_bytes())
    if not again and psutil.cpu_percent(_SECONDS) > _BUSY:
        name = passing
    speeds = measure()
    for folder in cache_directories():
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=folder)
            os.close(descriptor)
            Path(temporary).write_bytes(TypeAdapter(kind).dump_json(speeds))
            Path(temporary).replace(folder / name)  # whole or not at all
            break
    return speeds
