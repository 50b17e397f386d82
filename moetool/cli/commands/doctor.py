"""Command line of `moetool doctor`: reports on libraries, memory, disk, compiler and speed of this machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moetool.checkpoint.sizes import format_bytes
from moetool.checkpoint.source import local_path
from moetool.cli import next_step
from moetool.cli.display import AsJson, print_fields, print_json, print_table
from moetool.cli.generate import builder
from moetool.job.forecast import format_seconds
from moetool.measure.doctor import Diagnosis, doctor

if TYPE_CHECKING:
    from moetool.measure.hardware import Hardware, Speed


@builder()
def build(
    output: Annotated[Path, typer.Argument(help="Where results will go.")] = Path(),
    json: AsJson = False,
) -> None:
    """Run `moetool doctor` for a directory where results are to go."""
    result = doctor(local_path(output))
    if json:
        print_json(result.to_json())
    else:
        _print(result)
        again = f"{next_step.line('doctor', str(output))}, when that is mended"
        next_step.tell(again if result.problems else next_step.line("demo"))
    if result.exit_code:
        raise typer.Exit(result.exit_code)


def _print(result: Diagnosis) -> None:
    hub = {None: "unknown", True: "offline: nothing but what is in the cache", False: "may be asked"}[result.offline]
    fields = [("moetool", f"{result.moetool}, Python {result.python}, {result.platform}")]
    fields += [] if result.hardware is None else _hardware(result.hardware)
    for room in result.disk:
        fields.append((room.use, f"{format_bytes(room.free_bytes)} free in {room.path}{_but(room.problem)}"))
    print_fields([*fields, ("hub", hub)])
    required = [(own.name, own.version or "missing", own.at_least, own.tested) for own in result.libraries]
    print_table(("library", "here", "at least", "tested with"), required, numbers=False)
    extras = [(own.name, own.version or "missing", own.at_least, own.purpose, own.install) for own in result.extras]
    print_table(("extra", "here", "at least", "for", "brought by"), extras, numbers=False)
    slow = [] if result.hardware is None else [("slow", said) for said in result.hardware.slow]
    print_fields([*slow, *(("problem", problem.message) for problem in result.problems)])
    print("not ok" if result.problems else "ok")


def _hardware(found: "Hardware") -> list[tuple[str, str]]:
    processor, kernels, memory = found.processor, found.kernels, found.memory
    count, threads = (
        f"{number} {word}{'s' * (number > 1)}"
        for number, word in ((processor.count, "processor"), (processor.threads, "thread"))
    )
    built = f"by {kernels.compiler} for {kernels.built_for}; products of bf16 by {kernels.bf16 or 'torch'}"
    fields = [
        ("torch", f"built for {found.built_for}"),
        ("processor", f"{processor.name}, {count}, {threads}, {processor.instructions}"),
    ]
    for card in found.cards:
        free = f"{format_bytes(card.free_bytes)} free of {format_bytes(card.memory_bytes)}"
        fields.append(("card", f"{card.name}, {free}{_but(card.kernels_problem)}"))
    fields += [
        ("kernels", built if kernels.problem is None else f"none: {kernels.problem}"),
        ("memory", f"{format_bytes(memory.free_bytes)} free of {format_bytes(memory.total_bytes)}"),
    ]
    return fields if found.speed is None else [*fields, ("speed", _speed(found.speed))]


def _speed(speed: "Speed") -> str:
    products = ", ".join(f"{rate / 1e9:,.0f} in {precision}" for precision, rate in speed.products.items())
    solved = f"all eigenpairs of {speed.eigen_size} × {speed.eigen_size} take {format_seconds(speed.eigen_seconds)}"
    disk = f"the disk reads {format_bytes(speed.read)}/s and writes {format_bytes(speed.written)}/s"
    return f"on {speed.device}, 10⁹ multiply-adds per second: {products}; {solved}; {disk}"


def _but(problem: str | None) -> str:
    return "" if problem is None else f", but {problem}"
