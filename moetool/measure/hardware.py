"""Description of this machine's hardware, with the speeds that were measured on it."""

import os
import platform
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import torch

from moetool.compiled import compiler
from moetool.costs.machine import Machine, this_machine
from moetool.job.forecast import format_seconds
from moetool.job.job import pick_device
from moetool.job.result import Inlined, Printed
from moetool.kernels import card, cpu
from moetool.numerics.work import PRECISIONS, Precision, Work
from moetool.runtime.memory import free_bytes

_SOLVED = 4096  # the width of usual models
_TOKENS = 100_000  # of calibration, about
_SLOW_DISK = 1e8  # bytes per second
_UNAFFECTED = 0.8  # share of fp32's speed that bf16 must have not to be told of


@dataclass(frozen=True)
class Processor(Printed):
    """The processor.

    Attributes:
        name: as the system has it.
        count: of logical processors that this process may use.
        threads: that torch takes.
        instructions: the widest that torch's own products use, such as `AVX512`.
    """

    name: str
    count: int
    threads: int
    instructions: str


@dataclass(frozen=True)
class Card(Printed):
    """A card that torch finds.

    Attributes:
        name: as the driver has it.
        memory_bytes, free_bytes: its memory, and what of it is free.
        kernels_problem: why moetool's kernels do not run there; `None` if they do.
    """

    name: str
    memory_bytes: int
    free_bytes: int
    kernels_problem: str | None


@dataclass(frozen=True)
class CompiledKernels(Printed):
    """The kernels of the processor, compiled here if they were not before.

    Attributes:
        compiler: the command; `None` if there is none.
        problem: why there are no kernels; `None` if there are.
        built_for: what they were compiled for, e.g. `AVX-512 with VNNI, threads`; `None` if there are none.
        bf16: the instructions by which they multiply in bf16; `None` where the processor has none for it.
    """

    compiler: str | None
    problem: str | None
    built_for: str | None
    bf16: Literal["AVX-512", "AMX"] | None


@dataclass(frozen=True)
class MainMemory(Printed):
    """Main memory of the machine in bytes, as far as control groups allow."""

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Speed(Printed):
    """Measured speed of the machine.

    Attributes:
        device: that computes, as `--device auto` takes it.
        products: multiply-adds per second, by precision.
        eigen_size, eigen_seconds: n, and the seconds that all eigenpairs of a symmetric n × n matrix take in fp64.
        read, written: bytes per second of the disk that results will be on.
    """

    device: str
    products: Mapping[Precision, float]
    eigen_size: int
    eigen_seconds: float
    read: float
    written: float


@dataclass(frozen=True)
class Hardware(Inlined):
    """The processor and the cards that torch can compute on.

    Attributes:
        built_for: what torch was built for: `cpu`, or a version of CUDA or ROCm.
        processor: the one that there always is.
        cards: all that torch finds.
        kernels: those of the processor.
        memory: of the machine.
        speed: measured once and remembered; `None` where it cannot be measured, or may not.
        slow: what will be slow, and why, in sentences.
    """

    built_for: str
    processor: Processor
    cards: Sequence[Card]
    kernels: CompiledKernels
    memory: MainMemory
    speed: Speed | None
    slow: Sequence[str]


def hardware(output: Path) -> Hardware:
    """Describe this machine, for results in `output`.

    Kernels are compiled and speeds measured where that was not done before, which takes about ten seconds and three.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says in them what is told here
        cards = [_card(number) for number in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    processor, kernels = _processor(), _kernels()
    try:
        machine = this_machine(pick_device("auto"), output)
    except OSError:
        machine = None
    return Hardware(
        built_for=_built_for(),
        processor=processor,
        cards=cards,
        kernels=kernels,
        memory=MainMemory(int(psutil.virtual_memory().total), free_bytes()),
        speed=None if machine is None else _speed(machine, pick_device("auto")),
        slow=[
            *_slow_devices(processor, cards, machine),
            *_slow_kernels(kernels, cards),
            *([] if machine is None else _slow_speeds(machine, cards)),
        ],
    )


def _built_for() -> str:
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    return f"ROCm {torch.version.hip}" if torch.version.hip else "cpu"


def _processor() -> Processor:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return Processor(
        name or platform.processor() or platform.machine(),
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        torch.get_num_threads(),
        torch.backends.cpu.get_cpu_capability(),
    )


def _card(number: int) -> Card:
    device = torch.device("cuda", number)
    free, total = torch.cuda.mem_get_info(device)
    return Card(torch.cuda.get_device_name(device), int(total), int(free), card.problem(device) or None)


def _kernels() -> CompiledKernels:
    problem = compiler.problem() or None
    command = " ".join(compiler.compiler_command()) or None
    if problem is not None:
        return CompiledKernels(command, problem, None, None)
    return CompiledKernels(command, None, cpu.built_for(), cpu.multiplies_by())


def _speed(machine: Machine, device: torch.device) -> Speed:
    solved = machine.seconds(Work(eigen={_SOLVED: 1}))
    products = {precision: machine.products[precision] for precision in PRECISIONS}
    return Speed(device.type, products, _SOLVED, solved, machine.read, machine.written)


# What is slow.


def _slow_devices(processor: Processor, cards: Sequence[Card], machine: Machine | None) -> list[str]:
    said = []
    if not cards:
        reason = "There is no card"
        if shutil.which("nvidia-smi"):
            why = "was built without CUDA" if torch.version.cuda is None else "cannot use it: see nvidia-smi"
            reason = f"There is a driver for cards, but torch {why}"
        cost = ""
        if machine is not None:
            seconds = _TOKENS * 1e9 / machine.products["float32"]
            cost = (
                f"; {_TOKENS:,} tokens of calibration take about {format_seconds(seconds)} for every billion "
                "parameters that a token uses, and several times that with gradients"
            )
        said.append(f"{reason}: calibration, eval and tune run on the processor, in fp32{cost}.")
    expected = min(processor.count, psutil.cpu_count(logical=False) or processor.count)
    if processor.threads < expected:
        said.append(
            f"torch takes {processor.threads} thread{'s' * (processor.threads > 1)} where {expected} would have a core "
            "each: OMP_NUM_THREADS sets them."
        )
    return said


def _slow_kernels(kernels: CompiledKernels, cards: Sequence[Card]) -> list[str]:
    said = []
    if kernels.problem is not None:
        said.append(
            "Compressed models run in plain torch, in which a token takes several times as long: "
            f"{kernels.problem.rstrip('.')}."
        )
    elif kernels.bf16 is None:
        said.append("Long prompts of compressed models in bf16: the processor has no products of bf16.")
    if kernels.built_for is not None and kernels.built_for.endswith("one thread"):
        said.append(f"Compressed models run on one thread: {kernels.compiler} compiles without OpenMP (clang: libomp).")
    for own in cards:
        if own.kernels_problem is not None:
            said.append(f"Compressed models on {own.name} run in plain torch: {own.kernels_problem.rstrip('.')}.")
    return said


def _slow_speeds(machine: Machine, cards: Sequence[Card]) -> list[str]:
    said = []
    ratio = machine.products["bfloat16"] / machine.products["float32"]
    if not cards and ratio < _UNAFFECTED:
        said.append(
            f"Products in bf16 run at {ratio:.0%} of the speed of fp32: dense models read prompts faster with "
            "--compute-dtype float32 (generate, chat, bench). Compressed ones compute in fp32 where that is faster."
        )
    slowest = min(machine.read, machine.written)
    if slowest < _SLOW_DISK:
        said.append(
            f"The disk of the results moves {slowest / 1e6:.0f} MB per second: every 100 GB that are read or written "
            f"take {format_seconds(1e11 / slowest)}."
        )
    return said
