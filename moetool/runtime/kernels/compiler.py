"""The C++ of this directory as a library: compiled once per machine and version, kept in the user's cache."""

import atexit
import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

_LOGGER = logging.getLogger(__name__)
_SOURCES = [Path(__file__).with_name(name) for name in ("routed.cpp", "matrices.h", "vectors.h")]
_SECONDS = 120  # that a compiler may take
# Not `-ffast-math`: older compilers then let the library turn off denormal numbers for the whole process.
_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=fast", "-fno-math-errno", "-w")
_VARIANTS = (("-march=native", "-fopenmp"), ("-march=native",), ())  # the first that compiles and loads is taken


@cache
def problem() -> str:
    """Why there are no compiled kernels here, in a sentence; nothing if there are. Compiles them when asked first."""
    if os.environ.get("MOETOOL_KERNELS", "").lower() in {"0", "off", "no"}:
        return "MOETOOL_KERNELS=off is set"
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    if compiler is None:
        return "there is no C++ compiler (c++, g++ or clang++) on the path; Debian has one in the package g++"
    said = ""
    for flags in _VARIANTS:
        try:
            _LOADED.append(ctypes.CDLL(str(_compiled(compiler, flags))))
        except (OSError, subprocess.SubprocessError) as error:
            said = said or " ".join((getattr(error, "stderr", None) or str(error)).split())[:200]
        else:
            return ""
    return f"{compiler} cannot compile or load them: {said}"


def library() -> ctypes.CDLL:
    """The compiled kernels.

    Raises:
        RuntimeError: there are none, see `problem`.
    """
    if reason := problem():
        raise RuntimeError(f"moetool has no kernels: {reason}.")
    return _LOADED[0]


_LOADED: list[ctypes.CDLL] = []


def _compiled(compiler: str, flags: tuple[str, ...]) -> Path:
    """The library's file, made if the cache does not have it."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=_SECONDS, check=True)
    made_from = "\0".join(
        [
            *(source.read_text() for source in _SOURCES),
            version.stdout,
            *_FLAGS,
            *flags,
            platform.machine(),
            _processor(),
        ]
    )
    folder = _writable(cache_directory())
    file = folder / f"routed-{hashlib.sha256(made_from.encode()).hexdigest()[:20]}.so"
    if file.exists():
        return file
    _LOGGER.info("compiling kernels with %s, once", compiler)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        target = Path(made) / file.name
        subprocess.run(
            [compiler, *_FLAGS, *flags, str(_SOURCES[0]), "-o", str(target)],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=True,
        )
        target.replace(file)  # whole or not at all, whoever else compiles now
    return file


def cache_directory() -> Path:
    """Where compiled kernels are kept: `$XDG_CACHE_HOME/moetool`, or `~/.cache/moetool`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moetool"


def _writable(folder: Path) -> Path:
    """The folder, made if need be, or one for this process alone where that cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        own = Path(tempfile.mkdtemp(prefix="moetool-"))
        atexit.register(shutil.rmtree, own, ignore_errors=True)
        return own


def _processor() -> str:
    """What decides over the instructions that `-march=native` uses: homes are shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
