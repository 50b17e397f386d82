"""The C++ of this directory as a library: compiled once per machine and version, kept in the user's cache."""

import atexit
import ctypes
import errno
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

import torch

from moetool.compiled import forms

_LOGGER = logging.getLogger(__name__)
_SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
_LONGEST = "routed.cpp"  # which takes as long as all others, and is compiled beside them
_HEADERS = sorted(Path(__file__).parent.glob("*.h"))
_ROOM = 8 << 20  # bytes; the kernels are a tenth of that
_SECONDS = 300  # that a compiler may take; it takes about 30 of processor time, half of it in `_LONGEST`
# Not `-ffast-math`: older compilers then let the library turn off denormal numbers for the whole process.
_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=fast", "-fno-math-errno", "-w")
# The first that compiles and loads is taken, of those for the instructions that `MOETOOL_INSTRUCTIONS` names.
_NATIVE, _AVX2, _PLAIN = ("-march=native",), ("-mavx2", "-mfma", "-mf16c"), ()
_INSTRUCTIONS = {"native": (_NATIVE, _PLAIN), "avx2": (_AVX2,), "plain": (_PLAIN,)}


@cache
def added_forms() -> dict[str, Path]:
    """The headers of the forms that are one header each, by name, in the order in which they are numbered."""
    headers = [file for folder in forms.__path__ for file in Path(folder).glob("*.h")]
    return {file.stem: file for file in sorted(headers, key=lambda file: file.stem)}


def _added_header() -> str:
    """The C++ by which `matrices.h` knows them."""
    sources = [(name, file.read_text()) for name, file in added_forms().items()]
    structs = [f"{text}\ntemplate <> struct Added<{i}> : {name} {{}};" for i, (name, text) in enumerate(sources)]
    cases = "".join(f" each((Form)(ADDED + {number}))" for number in range(len(structs)))
    return "\n".join([*structs, f"#define ADDED_FORMS(each){cases}\n"])


def library() -> ctypes.CDLL:
    """The compiled kernels.

    Raises:
        RuntimeError: there are none, see `problem`.
    """
    if reason := problem():
        raise RuntimeError(f"moetool has no kernels: {reason}.")
    return _LOADED[0]


@cache
def problem() -> str:
    """Why there are no compiled kernels here, in a sentence; nothing if there are. Compiles them when asked first, and
    says once where it cannot."""
    reason = _attempt()
    if reason:
        _LOGGER.warning("moetool multiplies by compressed weights in plain torch, which is slower: %s", reason)
    return reason


def _attempt() -> str:
    """Compile or find them, and load them; why that is impossible, if it is."""
    if os.environ.get("MOETOOL_KERNELS", "").lower() in {"0", "off", "no"}:
        return "MOETOOL_KERNELS=off is set"
    if os.name != "posix":
        return f"they are compiled on Linux and macOS, not on {platform.system()}"
    if not (compiler := compiler_command()):
        return "there is no C++ compiler (c++, g++ or clang++) on the path; Debian has one in the package g++"
    wanted = os.environ.get("MOETOOL_INSTRUCTIONS", "").lower() or "native"
    if wanted not in _INSTRUCTIONS:
        return f"MOETOOL_INSTRUCTIONS={wanted} is set, which is none of {', '.join(_INSTRUCTIONS)}"
    if wanted == "avx2" and "avx2" not in _processor().split():  # the first of them would end the process
        return "MOETOOL_INSTRUCTIONS=avx2 is set, and the processor does not have them"
    said = ""
    for flags in ((*own, *threads) for own in _INSTRUCTIONS[wanted] for threads in (("-fopenmp",), ())):
        try:
            _LOADED.append(load(compiler, flags))
        except subprocess.TimeoutExpired:
            return f"{compiler[0]} has not compiled them in {_SECONDS} seconds"
        except (OSError, subprocess.SubprocessError) as error:
            words = " ".join((getattr(error, "stderr", None) or str(error)).split())
            said = said or words[:200]
            if any(os.strerror(number) in words for number in (errno.ENOSPC, errno.EDQUOT)):
                break  # with other flags it would take as long, and fail as it did
        else:
            return ""
    return f"{compiler[0]} cannot compile or load them: {said}"


def compiler_command() -> list[str]:
    """`$CXX` in words, or the first compiler on the path; nothing if there is none."""
    try:
        given = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:  # a quotation mark without its partner
        _LOGGER.warning("CXX=%s is no command (%s) and is ignored", os.environ["CXX"], error)
        given = []
    return given or [*filter(shutil.which, ("c++", "g++", "clang++"))][:1]


_LOADED: list[ctypes.CDLL] = []


def load(compiler: Sequence[str], flags: Sequence[str]) -> ctypes.CDLL:
    """The kernels as `compiler` makes them with `flags` beside its own, from the cache if they are in there.

    Raises:
        OSError, subprocess.SubprocessError: it cannot be run, fails, takes too long, or what it makes does not load.
    """
    made_from = [
        *(source.read_text() for source in (*_SOURCES, *_HEADERS)),
        added := _added_header(),
        *_run([*compiler, "--version"]),
        *(*_FLAGS, *flags, platform.machine(), _processor()),
    ]
    name = f"routed-{_digest('|'.join(made_from).encode())}"
    for file in (file for folder in filter(_is_own, cache_directories()) for file in folder.glob(f"{name}.*.so")):
        with suppress(OSError):
            if file == file.parent / _named(name, file):  # half a library can end the process that loads it
                return ctypes.CDLL(str(file))
        with suppress(OSError):
            file.unlink(missing_ok=True)
    folder = _roomy()
    _LOGGER.info("compiling kernels with %s, once", compiler[0])
    with tempfile.TemporaryDirectory(dir=folder) as made:
        target = Path(made) / f"{name}.so"
        (Path(made) / "added_forms.h").write_text(added)
        shared = (*compiler, *_FLAGS, *flags)
        parts = ([str(source) for source in _SOURCES if (source.name == _LONGEST) is own] for own in (True, False))
        _run(*([*shared, "-c", *sources, "-I", made] for sources in parts), folder=made)
        _run([*shared, *(f"{source.stem}.o" for source in _SOURCES), "-o", target.name], folder=made)
        file = folder / _named(name, target)
        target.replace(file)  # whole or not at all, whoever else compiles now
    return ctypes.CDLL(str(file))


def threads() -> int:
    """Number of threads for kernels: torch's, but one in a forked process.

    There, GNU's OpenMP would wait for threads that only the parent has.
    """
    return torch.get_num_threads() if os.getpid() == _PROCESS else 1


_PROCESS = os.getpid()  # that this was imported in


def _named(name: str, file: Path) -> str:
    """What a library is called in the cache: what it was made from, and what it is."""
    return f"{name}.{_digest(file.read_bytes())}.so"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:20]


_AT_WORK: list[threading.Thread] = []  # threads that wait for a compiler


def is_compiling() -> bool:
    """Whether the main thread, in which handlers of signals run, waits for a compiler: an exception ends that."""
    return threading.main_thread() in _AT_WORK


def _run(*commands: Sequence[str], folder: str | None = None) -> list[str]:
    """What commands print that run at the same time, in a folder. When one takes too long or fails, all are ended, and
    so is what they have started."""
    _AT_WORK.append(threading.current_thread())
    with ExitStack() as started:
        started.callback(_AT_WORK.remove, threading.current_thread())
        with _undisturbed():  # or one that a signal meets while it starts would be left
            at_work = [(command, started.enter_context(_started(command, folder))) for command in commands]
        return [_printed(command, process) for command, process in at_work]


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Signals that ask to stop are heard when what is done here is done. Blocking them would not do: Python hears of
    those that reach another thread, too."""
    kinds = (signal.SIGTERM, signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or None in map(signal.getsignal, kinds):
        yield
        return
    heard = list[int]()
    before = {kind: signal.signal(kind, lambda number, _: heard.append(number)) for kind in kinds}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
        for number in heard[:1]:
            signal.raise_signal(number)


@contextmanager
def _started(command: Sequence[str], folder: str | None) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            yield process
        except BaseException:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            raise


def _printed(command: Sequence[str], process: "subprocess.Popen[str]") -> str:
    output, complaints = process.communicate(timeout=_SECONDS)
    if process.returncode:
        message = complaints.strip() or f"it ended with {process.returncode}"
        raise subprocess.CalledProcessError(process.returncode, command, output, message)
    return output


def cache_directories() -> Iterator[Path]:
    """Where compiled kernels may be kept, the best first: `$XDG_CACHE_HOME/moetool` or `~/.cache/moetool`, and a folder
    of the user's own beside temporary files. A relative `$XDG_CACHE_HOME` counts as none, as its specification says."""
    if (given := Path(os.environ.get("XDG_CACHE_HOME", ""))).is_absolute():
        yield given / "moetool"
    else:
        with suppress(RuntimeError):  # nobody's home
            if (home := Path.home()).is_absolute():
                yield home / ".cache" / "moetool"
    yield Path(tempfile.gettempdir()) / f"moetool-{os.getuid()}"


def _is_own(folder: Path) -> bool:
    """Whether only this user can write in a folder: what lies there is run."""
    try:
        state = folder.lstat()
    except OSError:
        return False
    return state.st_uid == os.getuid() and not state.st_mode & 0o022 and folder.is_dir() and not folder.is_symlink()


@cache
def _roomy() -> Path:
    """The first of the folders that this user alone can write to and that has room for the kernels; one for this
    process alone if there is none."""
    for folder in cache_directories():
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as tried:
                tried.write(bytes(_ROOM))
            if _is_own(folder):
                return folder
        except OSError:
            pass
    own = Path(tempfile.mkdtemp(prefix="moetool-"))
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    return own


@cache
def _processor() -> str:
    """What decides over the instructions that `-march=native` uses: homes are shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
