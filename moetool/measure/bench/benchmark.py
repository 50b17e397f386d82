"""Benchmark of one model, or of two in alternating rounds so that drifts of the machine hit both."""

import platform
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace

import torch

from moetool.architectures.dense import is_encoder
from moetool.checkpoint.counting import numbers_in_files
from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.sizes import format_bytes
from moetool.costs.machine import copy_bandwidth
from moetool.errors import ResourceError, UsageError
from moetool.job.conditions import with_threads
from moetool.job.job import pick_device
from moetool.job.progress import SILENT, Progress, phase
from moetool.measure.bench.costs import Costs
from moetool.measure.bench.options import BenchOptions, fit_lengths
from moetool.measure.bench.result import Benched, BenchResult, Case, CaseRatios, Memory, Ratios
from moetool.measure.bench.runner import HereRunner, Loaded, Runner, ThereRunner, compute_dtype
from moetool.runtime.memory import free_bytes
from moetool.runtime.timing import Seconds


@dataclass(frozen=True)
class _Timed:
    """Seconds of all rounds of one case, prefill and decode."""

    batch: int
    length: int
    rounds: list[Seconds]


def bench(path: str, options: BenchOptions, progress: Progress = SILENT) -> BenchResult:
    """Load a model, and time it by batch and length; with `against` another in turns, each in a process of its own.

    Every case is run once without being timed, then `rounds` times; of two models the one that goes first changes
    from round to round.

    Raises:
        InvalidInputError: transformers cannot load or run a model.
        ResourceError: memory does not suffice, now or as far as one can tell before loading.
        UsageError: prompts are longer than a model goes, or it is to generate and cannot.
    """
    paths = [path] if options.against is None else [path, options.against]
    checkpoints = [Checkpoint.open(own) for own in paths]
    _check_decoders(checkpoints, options)
    options = fit_lengths(options, *checkpoints)
    _check_memory(checkpoints, options)
    threads = options.threads or torch.get_num_threads()
    with with_threads(threads):
        bandwidth = None if options.device == "map" else copy_bandwidth(pick_device(options.device))
        with _runners(paths, options, threads) as runners:
            loaded = _load(runners, progress)
            memories, timed = _measure(runners, options, progress)
    told = zip(paths, checkpoints, loaded, memories, timed, strict=True)
    models = [_benched(*own, options.new_tokens, bandwidth) for own in told]
    model, *others = models
    return BenchResult(
        device=_device_name(options.device),
        threads=threads,
        copy_bytes_per_second=bandwidth,
        rounds=options.rounds,
        new_tokens=options.new_tokens,
        model=model,
        against=others[0] if others else None,
        ratios=_ratios(model, others[0], timed) if others else None,
    )


def _check_decoders(checkpoints: Sequence[Checkpoint], options: BenchOptions) -> None:
    for checkpoint in checkpoints:
        if options.new_tokens and is_encoder(checkpoint.config):
            raise UsageError(
                f"{checkpoint.source} is an encoder ({checkpoint.config.get('model_type')}): it generates nothing. "
                "--new-tokens 0 times its pass over a text alone."
            )


def _check_memory(checkpoints: Sequence[Checkpoint], options: BenchOptions) -> None:
    """Raise `ResourceError` if the weights alone do not fit. A large model that is spread goes to disk, too."""
    if options.device == "map":
        return
    device = pick_device(options.device)
    free = free_bytes(device)
    needed = [_needed(checkpoint, compute_dtype(checkpoint, options.compute_dtype)) for checkpoint in checkpoints]
    if options.offload == "experts":
        needed[0] = 0  # what it takes is asked for when its files are mapped
    if sum(needed) > free:
        each = " and ".join(
            f"{format_bytes(size)} for {own.source}" for size, own in zip(needed, checkpoints, strict=True)
        )
        alone = " Without --against one is loaded at a time." if len(needed) > 1 else ""
        raise ResourceError(
            f"Weights take {each}, and {format_bytes(free)} of memory are free. --device map spreads a model over what "
            f"there is.{alone}"
        )


def _needed(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """Bytes of a model's weights when those of floating point are `dtype`."""
    return sum(
        info.nbytes // info.dtype.itemsize * (dtype if info.dtype.is_floating_point else info.dtype).itemsize
        for info in checkpoint.tensors.values()
    )


@contextmanager
def _runners(paths: Sequence[str], options: BenchOptions, threads: int) -> Iterator[list[Runner]]:
    """A runner per model, none of which is loaded; two get processes, which begin at once."""
    if len(paths) == 1:
        yield [HereRunner(paths[0], options)]
        return
    with ExitStack() as stack:
        # Only the model is moefied or paged: its original has no share to keep.
        each = [options, *[options.model_copy(update={"keep": None, "offload": "none"})] * (len(paths) - 1)]
        yield [
            stack.enter_context(closing(ThereRunner(path, own, threads))) for path, own in zip(paths, each, strict=True)
        ]


def _load(runners: Sequence[Runner], progress: Progress) -> list[Loaded]:
    """All of them, one after the other, when none does anything else."""
    loaded = []
    for runner in runners:
        runner.prepare()
    with phase(progress, "Load", len(runners), "models"):
        for runner in runners:
            loaded.append(runner.load())
            progress.advance()
    return loaded


def _measure(
    runners: Sequence[Runner], options: BenchOptions, progress: Progress
) -> tuple[list[Memory], list[list[_Timed]]]:
    """Measure the memory of each model and time its cases."""
    cases = [(batch, length) for length in options.lengths for batch in options.batch]
    memories: list[Memory] = []
    timed: list[list[_Timed]] = [[] for _ in runners]
    with phase(progress, "Time", len(cases) * (options.rounds + 1), "rounds"):
        for batch, length in cases:
            memories = [runner.warm_up(batch, length) for runner in runners]
            progress.advance()
            rounds: list[list[Seconds]] = [[] for _ in runners]
            for number in range(options.rounds):
                order = range(len(runners)) if number % 2 else reversed(range(len(runners)))
                for one in order:
                    rounds[one].append(runners[one].time(batch, length))
                progress.advance()
            for own, seconds in zip(timed, rounds, strict=True):
                own.append(_Timed(batch, length, seconds))
    return memories, timed


def _benched(
    path: str,
    checkpoint: Checkpoint,
    loaded: Loaded,
    memory: Memory,
    timed: list[_Timed],
    new_tokens: int,
    bandwidth: float | None,
) -> Benched:
    return Benched(
        model=path,
        parameters=numbers_in_files(checkpoint),
        dtype=loaded.dtype,
        synthesized=loaded.synthesized,
        load_seconds=loaded.seconds,
        memory=memory,
        cases=[_case(loaded.costs, case, new_tokens, bandwidth) for case in timed],
    )


def _case(costs: Costs, timed: _Timed, new_tokens: int, bandwidth: float | None) -> Case:
    batch, length = timed.batch, timed.length
    prefill = statistics.median(seconds.prefill for seconds in timed.rounds)
    flops = batch * costs.prefill_flops(length)
    speed = batch * length / prefill
    case = Case(batch=batch, length=length, prefill_seconds=prefill, prefill_tokens_per_second=speed, flops=flops)
    if not new_tokens:
        return case
    decode = statistics.median(seconds.decode for seconds in timed.rounds)
    read = sum(costs.decode_bytes(length + new) for new in range(1, new_tokens + 1))
    return replace(
        case,
        decode_seconds=decode,
        decode_tokens_per_second=batch * new_tokens / decode,
        tokens_per_second=batch * new_tokens / statistics.median(map(sum, timed.rounds)),
        flops=flops + batch * sum(costs.decode_flops(length + new, batch) for new in range(1, new_tokens + 1)),
        flops_per_token=costs.decode_flops(length + 1),
        bytes_per_token=costs.decode_bytes(length + 1),
        bandwidth_share=read / decode / bandwidth if bandwidth is not None and batch == 1 else None,
    )


def _ratios(model: Benched, original: Benched, timed: list[list[_Timed]]) -> Ratios:
    one, other = model.memory, original.memory
    return Ratios(
        parameters=model.parameters / original.parameters,
        load_seconds=model.load_seconds / original.load_seconds,
        file_bytes=one.file_bytes / other.file_bytes,
        weight_bytes=one.weight_bytes / other.weight_bytes,
        anonymous_bytes=_ratio(one.anonymous_bytes, other.anonymous_bytes),
        unique_bytes=_ratio(one.unique_bytes, other.unique_bytes),
        load_peak_bytes=_ratio(one.load_peak_bytes, other.load_peak_bytes),
        peak_bytes=_ratio(one.peak_bytes, other.peak_bytes),
        device_bytes=_ratio(one.device_bytes, other.device_bytes),
        device_peak_bytes=_ratio(one.device_peak_bytes, other.device_peak_bytes),
        cases=[
            _case_ratios(own, other, ours.rounds, theirs.rounds)
            for own, other, ours, theirs in zip(model.cases, original.cases, *timed, strict=True)
        ],
    )


def _case_ratios(model: Case, original: Case, ours: list[Seconds], theirs: list[Seconds]) -> CaseRatios:
    rounds = list(zip(ours, theirs, strict=True))
    prefill = statistics.median(other.prefill / own.prefill for own, other in rounds)
    flops = model.flops / original.flops
    ratios = CaseRatios(batch=model.batch, length=model.length, prefill_tokens_per_second=prefill, flops=flops)
    if model.decode_seconds is None:
        return ratios
    return replace(
        ratios,
        decode_tokens_per_second=statistics.median(other.decode / own.decode for own, other in rounds),
        tokens_per_second=statistics.median(sum(other) / sum(own) for own, other in rounds),
        flops_per_token=_ratio(model.flops_per_token, original.flops_per_token),
        bytes_per_token=_ratio(model.bytes_per_token, original.bytes_per_token),
    )


def _ratio(model: int | None, original: int | None) -> float | None:
    """`None` for what the original has none of, as a process may that had more to give back than it took."""
    return None if model is None or not original or original < 0 else max(model, 0) / original


def _device_name(name: str) -> str:
    device = pick_device("auto" if name == "map" else name)
    known = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return f"{name if name == 'map' else device} ({known})"
