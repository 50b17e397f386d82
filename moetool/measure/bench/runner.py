"""One model in memory, to be timed: in this process, or in one of its own that waits while others run."""

import contextlib
import gc
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import psutil
import torch
from torch import Tensor

from moetool.architectures.dense import is_encoder
from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.settings import described_in
from moetool.errors import MoetoolError, ResourceError
from moetool.job.job import pick_compute_dtype, pick_device
from moetool.job.memory import PeakMemory, anonymous_bytes
from moetool.measure.bench.costs import Costs, model_costs
from moetool.measure.bench.options import BenchOptions
from moetool.measure.bench.result import Memory
from moetool.measure.loading import stored_dtype
from moetool.runtime.building import check_sizes
from moetool.runtime.loading import load_model
from moetool.runtime.memory import return_freed_memory, return_heap
from moetool.runtime.modules.moefied import set_keep
from moetool.runtime.paging import page_experts
from moetool.runtime.synthesis import apply_synthesis
from moetool.runtime.timing import Seconds, time_decode

_INTERVAL = 0.005  # seconds between two looks at memory


@dataclass(frozen=True)
class Loaded:
    """Facts of a model that its process reports when it has loaded it."""

    seconds: float
    dtype: str
    synthesized: bool
    memory: Memory
    costs: Costs


class HereRunner:
    """A model in this process, that can be loaded once, and then timed."""

    _model: Any
    _memory: Memory

    def __init__(self, path: str, options: BenchOptions) -> None:
        self._checkpoint, self._options = Checkpoint.open(path), options
        self._is_spread = options.device == "map"
        paged = options.offload == "experts"
        self._device = pick_device("cpu" if paged else "auto" if self._is_spread else options.device)

    def prepare(self) -> None:
        """Do all that comes before loading: what transformers imports for a model belongs to none of its numbers."""
        check_sizes(self._checkpoint)

    def load(self) -> Loaded:
        """Load it, and tell what that took. Raises `InvalidInputError` if transformers cannot."""
        checkpoint, options, device = self._checkpoint, self._options, self._device
        dtype = compute_dtype(checkpoint, options.compute_dtype)
        return_freed_memory()
        return_heap()
        self._anonymous, self._unique, self._card = anonymous_bytes(), _unique_bytes(), _card_bytes(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        start = time.perf_counter()
        with PeakMemory(_INTERVAL) as peak, described_in(checkpoint.path):
            paged = options.offload == "experts"
            self._model = load_model(checkpoint, dtype, "auto" if self._is_spread else device, paged=paged)
            asked = "on-the-fly" if paged else options.synthesize
            synthesized = apply_synthesis(self._model, asked, few_tokens=options.new_tokens > 0).chosen == "load"
            if paged:
                page_experts(self._model, options.memory)
        seconds = time.perf_counter() - start
        if options.keep is not None:
            set_keep(self._model, options.keep)
        gc.collect()
        return_heap()
        self._memory = Memory(
            file_bytes=checkpoint.given_bytes,
            weight_bytes=weight_bytes(self._model),
            anonymous_bytes=anonymous_bytes() - self._anonymous,
            unique_bytes=0,
            load_peak_bytes=peak.bytes - self._anonymous,
            peak_bytes=0,
            device_bytes=_card_bytes(device) - self._card,
            device_peak_bytes=0,
        )
        self._look(self._memory.load_peak_bytes)
        costs = model_costs(self._model, is_causal=not is_encoder(checkpoint.config))
        return Loaded(seconds, str(dtype).removeprefix("torch."), synthesized, self._memory, costs)

    def time(self, batch: int, length: int) -> Seconds:
        """Time, in this process, the prefill of a batch of prompts and the tokens generated after them."""
        return time_decode(self._model, batch, length, self._options.new_tokens, self._options.seed)

    def warm_up(self, batch: int, length: int) -> Memory:
        """Run a pass without timing it; returns the memory of the process with its peak so far."""
        with PeakMemory(_INTERVAL) as peak, described_in(self._checkpoint.path):
            self.time(batch, length)
        return_heap()
        self._look(peak.bytes - self._anonymous)
        return self._memory

    def _look(self, grown: int) -> None:
        """Note what there is now, and a peak of so much more than before."""
        self._memory = replace(
            self._memory,
            unique_bytes=_unique_bytes() - self._unique,
            peak_bytes=max(self._memory.peak_bytes, grown),
            device_peak_bytes=_card_bytes(self._device, peak=True) - self._card,
        )


class ThereRunner:
    """Runner that loads and times a model in a process of its own, which ends with its `with` block."""

    def __init__(self, path: str, options: BenchOptions, threads: int) -> None:
        self._path = path
        spawn = multiprocessing.get_context("spawn")  # a fork would have what this process has allocated
        self._connection, there = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(there, path, options, threads), daemon=True)
        self._process.start()
        there.close()

    def prepare(self) -> None:
        self._answer()

    def load(self) -> Loaded:
        return self._ask("load")

    def time(self, batch: int, length: int) -> Seconds:
        return self._ask("time", batch, length)

    def warm_up(self, batch: int, length: int) -> Memory:
        return self._ask("warm_up", batch, length)

    def _ask(self, name: str, *arguments: int) -> Any:
        with contextlib.suppress(ConnectionError):  # the answer says why
            self._connection.send((name, *arguments))
        return self._answer()

    def _answer(self) -> Any:
        try:
            answer = self._connection.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            if self._process.exitcode == -signal.SIGKILL:
                raise ResourceError(
                    f"The process that ran {self._path} was killed, most likely for its memory."
                ) from None
            raise RuntimeError(f"The process that ran {self._path} ended ({self._process.exitcode}).") from None
        if isinstance(answer, MoetoolError):
            raise answer
        return answer

    def close(self) -> None:
        """End the child process that holds a model, and kill it if it has not ended within 10 seconds."""
        self._connection.close()  # it then finds nothing more to read
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


Runner: TypeAlias = HereRunner | ThereRunner


def _serve(connection: Connection, path: str, options: BenchOptions, threads: int) -> None:
    """What the process of a `ThereRunner` does: load, and answer until nobody asks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one that asks is interrupted, too
    torch.set_num_threads(threads)
    with connection:
        try:
            runner = HereRunner(path, options)
            runner.prepare()
            connection.send(None)
            while True:
                name, *arguments = connection.recv()
                connection.send(getattr(runner, name)(*arguments))
        except (EOFError, ConnectionError):
            return
        except MoetoolError as error:
            connection.send(error)


def compute_dtype(checkpoint: Checkpoint, name: str) -> torch.dtype:
    """The dtype to compute in; `auto` is the dtype in which the model is stored."""
    stored = stored_dtype(checkpoint)
    return stored if name == "auto" else pick_compute_dtype(name, torch.device("cpu"), stored)


def weight_bytes(model: Any) -> int:
    """Parameters and buffers of a model, those that share memory once."""
    tensors: dict[Any, Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        tensors[id(tensor) if tensor.is_meta else (tensor.device, tensor.untyped_storage().data_ptr())] = tensor
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _unique_bytes() -> int:
    """Memory that would be free if this process ended."""
    memory = psutil.Process(os.getpid()).memory_full_info()
    return int(getattr(memory, "uss", memory.rss))


def _card_bytes(device: torch.device, *, peak: bool = False) -> int:
    """Allocated on a card, now or at most since that was reset; 0 without one."""
    if device.type != "cuda":
        return 0
    return torch.cuda.max_memory_allocated(device) if peak else torch.cuda.memory_allocated(device)
