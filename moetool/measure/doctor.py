"""Checks of this machine: libraries, devices, compiler, memory, disk, speed.

Nothing heavy is imported before its version is known and it was tried, so that a broken torch can be told of."""

import importlib
import os
import platform
import re
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from moetool.checkpoint.sizes import format_bytes
from moetool.errors import InvalidInputError, ResourceError, in_one_line
from moetool.job.result import Printed
from moetool.version import __version__

if TYPE_CHECKING:
    from moetool.measure.hardware import Hardware

LEAST_BYTES = 1_000_000_000  # of memory and of disk: what Python and its libraries take, and a little work

# By library: the least version, the first that is too new (both of pyproject.toml), and that of constraints.txt.
REQUIRED: dict[str, tuple[str, str | None, str]] = {
    "torch": ("2.11", None, "2.13.0"),
    "transformers": ("5.17", "6", "5.24.0"),
    "accelerate": ("1.10", None, "1.15.0"),
    "peft": ("0.18", None, "0.21.2"),
    "safetensors": ("0.6", None, "0.8.0"),
    "tokenizers": ("0.22", None, "0.23.3"),
    "datasets": ("4.0", None, "5.2.0"),
    "huggingface_hub": ("1.0", None, "2.4.0"),
    "typer": ("0.16", None, "0.29.2"),
    "rich": ("14.0", None, "15.0.0"),
    "pydantic": ("2.11", None, "2.14.3"),
    "pyyaml": ("6.0", None, "6.0.3"),
    "jinja2": ("3.1", None, "3.1.6"),
    "numpy": ("2.0", None, "2.4.6"),
    "scipy": ("1.14", None, "1.17.1"),
    "psutil": ("6.0", None, "7.2.2"),
    "xxhash": ("3.4", None, "4.1.0"),
}
# By library: the extra that brings it, the two versions (`None`: not tested), and what cannot be done without.
EXTRAS: dict[str, tuple[str, str, str | None, str]] = {
    "matplotlib": ("plots", "3.9", "3.11.2", "pictures: --plot, and the charts of report"),
    "bitsandbytes": ("bitsandbytes", "0.46", "0.50.2", "tune --quantize-base nf4 and int8 (QLoRA)"),
    "fastapi": ("serve", "0.115", "0.165.0", "serve"),
    "llama-cpp-python": ("llama-cpp", "0.3.16", None, "chat and serve with .gguf files"),
    "vllm": ("vllm", "0.28", None, "compressed experts in vLLM"),
    "lm-eval": ("tasks", "0.4.13", "0.4.13", "eval --tasks"),
    "gguf": ("gguf", "0.17", "0.19.0", "export --format gguf"),
    "compressed-tensors": ("compressed-tensors", "0.15", "0.20.0", "inputs in compressed-tensors' formats"),
}
_MODULES = {"pyyaml": "yaml", "lm-eval": "lm_eval"}  # that are called otherwise than the library


@dataclass(frozen=True)
class Library(Printed):
    """A library that moetool needs.

    Attributes:
        name: as pip knows it.
        version: that is installed; `None` if it is missing.
        at_least: the least version that will do.
        below: the first that will not again; `None` without one.
        tested: the version that moetool is tested with.
    """

    name: str
    version: str | None
    at_least: str
    below: str | None
    tested: str


@dataclass(frozen=True)
class Extra(Printed):
    """A library that some options need.

    Attributes:
        name, version, at_least, tested: as of a `Library`.
        purpose: what needs it.
        install: the command that brings it.
    """

    name: str
    version: str | None
    at_least: str
    tested: str | None
    purpose: str
    install: str


@dataclass(frozen=True)
class Room(Printed):
    """A folder where jobs write, and the free space there.

    Attributes:
        use: what is written there: results with their unfinished work, temporary files, downloaded models.
        path: of the folder.
        free_bytes: on its disk.
        problem: why nothing can be written there; `None` if that can.
    """

    use: Literal["results", "temporary files", "downloads"]
    path: str
    free_bytes: int
    problem: str | None


@dataclass(frozen=True)
class Trouble(Printed):
    """Something without which `compress` does not work.

    Attributes:
        message: what is wrong, and what to do.
        exit_code: of a job that comes upon it.
    """

    message: str
    exit_code: int


@dataclass(frozen=True, kw_only=True)
class Diagnosis(Printed):
    """Result of `moetool doctor`.

    Attributes:
        moetool, python, platform: versions of these.
        libraries: that are required.
        extras: that are not.
        offline: whether the hub is left alone; `None` without its library.
        disk: where jobs write.
        hardware: what there is to compute on; `None` where torch cannot be used.
        problems: what is broken; nothing if a plain `compress` has all that it needs.
    """

    moetool: str
    python: str
    platform: str
    libraries: Sequence[Library]
    extras: Sequence[Extra]
    offline: bool | None
    disk: Sequence[Room]
    hardware: "Hardware | None" = None
    problems: Sequence[Trouble]

    @property
    def exit_code(self) -> int:
        """0, or that of the problem that comes first in a job: what is missing goes before what is full."""
        return min((problem.exit_code for problem in self.problems), default=0)


def doctor(output: Path) -> Diagnosis:
    """The environment as it is, for results that go to `output`, which need not be there. Nothing that is wrong is
    raised: `Diagnosis.problems` has it."""
    libraries = [Library(name, _version(name), *versions) for name, versions in REQUIRED.items()]
    broken = [said for library in libraries if (said := _unfit(library)) is not None]
    if not broken:  # the first alone: others fail because it does
        broken = [said for library in libraries if (said := _failing(library)) is not None][:1]
    found = _hardware(output) if not broken else None
    offline, rooms = _hub()
    full = []
    try:
        rooms = [_room("results", output), _room("temporary files", Path(tempfile.gettempdir())), *rooms]
    except OSError as error:
        full.append(f"{error.strerror or error}: set TMPDIR to a folder that can be written.")
    full += [f"{room.path}: {room.problem}. {_REMEDIES[room.use]}" for room in rooms if _is_in_the_way(room)]
    if found is not None and found.memory.free_bytes < LEAST_BYTES:
        free, least = format_bytes(found.memory.free_bytes), format_bytes(LEAST_BYTES)
        full.append(
            f"{free} of memory are free, and any job takes {least}: end other programs, or allow this one more."
        )
    return Diagnosis(
        moetool=__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        libraries=libraries,
        extras=[
            Extra(name, _version(name), least, tested, purpose, f"pip install 'moetool[{extra}]'")
            for name, (extra, least, tested, purpose) in EXTRAS.items()
        ],
        offline=offline,
        disk=rooms,
        hardware=found,
        problems=[
            *(Trouble(said, InvalidInputError.exit_code) for said in broken),
            *(Trouble(said, ResourceError.exit_code) for said in full),
        ],
    )


_REMEDIES = {"results": "Free some, or take another OUTPUT.", "temporary files": "Free some, or set TMPDIR elsewhere."}


def _is_in_the_way(room: Room) -> bool:
    """Downloads are not: checkpoints may be there already."""
    return room.problem is not None and room.use in _REMEDIES


def _hardware(output: Path) -> "Hardware":
    from moetool.measure.hardware import hardware

    return hardware(output)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _unfit(library: Library) -> str | None:
    """Why the version of a library will not do, and what to do; `None` if it will."""
    if library.version is None:
        return f"{library.name} is missing: {_install(library)}."
    here = _numbers(library.version)
    if here < _numbers(library.at_least) or (library.below is not None and here >= _numbers(library.below)):
        return f"{library.name} {library.version} will not do: {_install(library)}."
    return None


def _failing(library: Library) -> str | None:
    """Say why a library cannot be imported; `None` if it can."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(_MODULES.get(library.name, library.name))
    except Exception as error:  # whatever a library does when it is loaded
        reason = in_one_line(error, 200).rstrip(".")
        remedy = f"{_install(library)} --force-reinstall"
        return f"{library.name} {library.version} cannot be imported ({reason}): {remedy}."
    return None


def _install(library: Library) -> str:
    return f"pip install '{library.name}>={library.at_least}{f',<{library.below}' if library.below else ''}'"


def _numbers(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` → `(2, 13)`: without zeros at the end, so that 6.0 is not less than 6."""
    digits = re.match(r"[\d.]*", version)
    numbers = [int(part) for part in (digits[0] if digits else "").split(".") if part]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def _hub() -> tuple[bool | None, list[Room]]:
    """Whether the hub is left alone, and where models from there are kept."""
    try:
        from huggingface_hub import constants
    except Exception:  # said of the library
        return None, []
    return bool(constants.HF_HUB_OFFLINE), [_room("downloads", Path(constants.HF_HUB_CACHE))]


def _room(use: Literal["results", "temporary files", "downloads"], path: Path) -> Room:
    there = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(there).free
    problem = None
    if not os.access(there, os.W_OK | os.X_OK):
        problem = "it may not be written"
    elif free < LEAST_BYTES:
        problem = f"{format_bytes(free)} are free there, and any job takes {format_bytes(LEAST_BYTES)}"
    return Room(use, str(path.absolute()), free, problem)
