"""Kernels are compiled once; where they cannot be, or not be kept, everything goes on and says so once."""

import logging
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from moetool.compiled import compiler
from moetool.errors import InterruptedRunError
from moetool.job.interrupt import listening
from moetool.kernels import products
from moetool.kernels.table import Table
from moetool.representations.operand import numbers

# A compiler in shell: says a version, counts its libraries, and copies one that was compiled before.
COMPILER = """#!/bin/sh
[ "$1" = --version ] && { echo 1; exit; }
case " $* " in *" -c "*) exit 0 ;; esac
echo x >> "$RUNS"
for last; do :; done
cp "$COMPILED" "$last"
"""


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and nothing known of compilers."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("MOETOOL_KERNELS", raising=False)
    monkeypatch.delenv("MOETOOL_INSTRUCTIONS", raising=False)
    monkeypatch.setattr(compiler, "_LOADED", [])
    monkeypatch.setattr(compiler.tempfile, "tempdir", str(tmp_path))
    clear()
    yield tmp_path
    clear()


def clear() -> None:
    compiler.problem.cache_clear()
    compiler._roomy.cache_clear()


@pytest.fixture
def runs(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a quick compiler counts its runs."""
    path = script(fresh / "compiler", COMPILER)
    source = fresh / "small.c"
    source.write_text("int moetool(void) { return 1; }")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", fresh / "small.so", source], check=True)
    for name, value in {"CXX": path, "RUNS": fresh / "runs", "COMPILED": fresh / "small.so"}.items():
        monkeypatch.setenv(name, str(value))
    return fresh / "runs"


def script(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def cached(fresh: Path) -> list[Path]:
    return sorted((fresh / "cache" / "moetool").iterdir())


needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


@needs_compiler
def test_compiled_once_and_then_found(runs: Path, fresh: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        assert compiler.problem() == ""
        assert compiler.library().moetool() == 1
        clear()
    assert runs.read_text() == "x\n"
    assert len(cached(fresh)) == 1
    assert capfd.readouterr() == ("", "")


@needs_compiler
def test_a_full_disk_is_passed_over(runs: Path, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels are already, they are found, though; a quota that is used up lets an empty file be made."""
    full, make = fresh / "cache" / "moetool", tempfile.TemporaryFile

    def refused(dir: Path) -> IO[bytes]:
        return Path("/dev/full").open("wb", buffering=0) if Path(dir) == full else make(dir=dir)

    with monkeypatch.context() as patch:
        patch.setattr(compiler.tempfile, "TemporaryFile", refused)
        assert compiler.problem() == ""
        assert (cached(fresh), len(list(fresh.glob("moetool-*/*.so")))) == ([], 1)
        clear()
        assert compiler.problem() == ""
    assert runs.read_text() == "x\n"


def test_a_full_disk_is_not_tried_again_with_other_flags(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = COMPILER.replace('cp "$COMPILED" "$last"', 'echo "ld: No space left on device" >&2; exit 1')
    monkeypatch.setenv("CXX", str(script(fresh / "compiler", failing)))
    monkeypatch.setenv("RUNS", str(fresh / "runs"))
    assert "No space left on device" in compiler.problem()
    assert (fresh / "runs").read_text() == "x\n"


@needs_compiler
@pytest.mark.parametrize("damage", ["half", "empty", "text"])
def test_a_damaged_library_is_made_again(damage: str, runs: Path, fresh: Path) -> None:
    assert compiler.problem() == ""
    (file,) = cached(fresh)
    whole = file.read_bytes()
    file.unlink()  # it is mapped: what is written in its place must be another file
    file.write_bytes({"half": whole[: len(whole) // 2], "empty": b"", "text": b"text"}[damage])
    clear()
    assert compiler.problem() == ""
    assert cached(fresh) == [file]
    assert file.read_bytes() == whole
    assert runs.read_text() == "x\nx\n"


@needs_compiler
def test_a_library_that_does_not_load_is_made_again(runs: Path, fresh: Path) -> None:
    """Whole, but of another machine."""
    assert compiler.problem() == ""
    (file,) = cached(fresh)
    other = fresh / "other"
    other.write_bytes(b"\x7fELF of another machine")
    name = compiler._named(file.name.split(".")[0], other)
    file.unlink()
    shutil.copy(other, file.with_name(name))
    clear()
    assert compiler.problem() == ""
    assert cached(fresh) == [file]


@needs_compiler
def test_another_compiler_and_other_sources_make_another_library(
    runs: Path, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compiler.problem() == ""
    script(fresh / "compiler", COMPILER.replace("echo 1", "echo 2"))
    clear()
    assert compiler.problem() == ""
    assert runs.read_text() == "x\nx\n"
    assert len(cached(fresh)) == 2


@needs_compiler
def test_another_processor_makes_another_library(runs: Path, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home is shared by machines: none may run what another's processor alone can."""
    assert compiler.problem() == ""
    (first,) = cached(fresh)
    monkeypatch.setattr(compiler, "_processor", lambda: "flags: fpu sse2")
    clear()
    assert compiler.problem() == ""
    assert len(cached(fresh)) == 2
    assert first in cached(fresh)
    assert runs.read_text() == "x\nx\n"


@needs_compiler
@pytest.mark.parametrize(
    ("value", "given"), [("", "-march=native"), ("Native", "-march=native"), ("AVX2", "-mavx2"), ("plain", "")]
)
def test_instructions_that_are_asked_for(
    value: str, given: str, runs: Path, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(fresh / "compiler", COMPILER.replace("echo x", 'echo "$@"'))
    monkeypatch.setattr(compiler, "_processor", lambda: "flags: avx2")
    monkeypatch.setenv("MOETOOL_INSTRUCTIONS", value)
    assert compiler.problem() == ""
    (line,) = runs.read_text().splitlines()
    assert [flag for flag in line.split() if flag.startswith("-m")][:1] == ([given] if given else [])
    assert "-fopenmp" in line.split()


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("avx512", "MOETOOL_INSTRUCTIONS=avx512 is set, which is none of native, avx2, plain"),
        ("avx2", "MOETOOL_INSTRUCTIONS=avx2 is set, and the processor does not have them"),
    ],
)
def test_instructions_that_there_are_not(value: str, says: str, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_processor", lambda: "flags: sse2 avx2x")
    monkeypatch.setenv("MOETOOL_INSTRUCTIONS", value)
    assert compiler.problem() == says
    assert not runs.exists()


@needs_compiler
@pytest.mark.parametrize("reason", ["a file is there", "others may write", "not the user's"])
def test_a_cache_that_cannot_be_used_or_trusted(
    reason: str, runs: Path, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fresh / "cache" / "moetool"
    if reason == "a file is there":
        (fresh / "cache").write_text("")
    else:
        folder.mkdir(parents=True)
        if reason == "others may write":
            folder.chmod(0o777)
        else:
            user = os.getuid()
            monkeypatch.setattr(os, "getuid", lambda: user + 1)
    assert compiler.problem() == ""
    assert not folder.is_dir() or cached(fresh) == []
    assert compiler.library().moetool() == 1


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("/bin/false", "/bin/false cannot compile or load them: it ended with 1"),
        ("nonsense-c++", r"nonsense-c\+\+ cannot compile or load them: .*No such file"),
        ("hangs", "has not compiled them in .* seconds"),
        ("complains", "cannot compile or load them: .*unknown type name"),
        ("is too old", "cannot compile or load them: .*unrecognized command line option '-std=c\\+\\+17'"),
        ("makes nothing", "cannot compile or load them: .*No such file"),
        ("makes nonsense", "cannot compile or load them: .*(file too short|ELF)"),
    ],
)
def test_a_compiler_that_does_not(
    command: str, says: str, fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scripts = {
        "hangs": "sleep 600 & wait",
        "complains": "[ $1 = --version ] || { echo unknown type name >&2; exit 1; }",
        "is too old": "[ $1 = --version ] || { echo \"unrecognized command line option '-std=c++17'\" >&2; exit 1; }",
        "makes nothing": "exit 0",
        "makes nonsense": "for last; do :; done; [ $1 = --version ] || [ -d $last ] || echo no > $last",
    }
    if command in scripts:
        command = str(script(fresh / "compiler", f"#!/bin/sh\n{scripts[command]}\n"))
    if "seconds" in says:
        monkeypatch.setattr(compiler, "_SECONDS", 0.2)
    monkeypatch.setenv("CXX", command)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert compiler.problem()
    (line,) = caplog.messages
    assert compiler.problem() in line
    assert re.search(says, line)
    with pytest.raises(RuntimeError, match="no kernels"):
        compiler.library()


def test_a_job_that_is_asked_to_stop_does_not_wait_for_the_compiler(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends the compiler, with what that has started, and leaves nothing of it in the cache."""
    waits = f"sleep 600 & echo $! > {fresh}/started-$$; kill -TERM $PPID; wait"
    command = script(fresh / "compiler", f"#!/bin/sh\n[ $1 = --version ] && exit 0\n{waits}\n")
    monkeypatch.setenv("CXX", str(command))
    with listening() as interrupt, pytest.raises(InterruptedRunError, match="while kernels were compiled"):
        compiler.problem()
    assert interrupt.requested
    assert not compiler.is_compiling()
    told, until = [path.read_text() for path in fresh.glob("started-*")], time.monotonic() + 10
    assert any(told)
    while not all(_is_gone(int(process)) for process in filter(None, told)):
        assert time.monotonic() < until
    assert list((fresh / "cache" / "moetool").iterdir()) == []


def _is_gone(process: int) -> bool:
    """Whether a process has ended, though nobody may have waited for it yet."""
    status = Path(f"/proc/{process}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] in ("Z", "X")


def test_no_compiler_and_turned_off(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(fresh))
    assert "there is no C++ compiler" in compiler.problem()
    clear()
    monkeypatch.setenv("MOETOOL_KERNELS", "off")
    assert compiler.problem() == "MOETOOL_KERNELS=off is set"
    assert len(caplog.messages) == 2


@needs_compiler
def test_two_processes_at_once(runs: Path, fresh: Path) -> None:
    """Both get kernels, and one library is left."""
    code = "from moetool.compiled.compiler import library; print(library().moetool())"
    command = [sys.executable, "-c", code]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate(timeout=120)[0] for process in started] == ["1\n"] * 2
    assert len(cached(fresh)) == 1


@pytest.mark.skipif(bool(compiler.problem()), reason=compiler.problem())
@pytest.mark.usefixtures("two_threads")
def test_a_forked_process_computes_too() -> None:
    """GNU's OpenMP would wait for threads that were not forked."""
    matrix, inputs, chosen = torch.randn(512, 512), torch.randn(2, 512), torch.zeros(2, dtype=torch.int64)
    table = Table([((numbers(matrix),),)], (512, 512), ())
    expected = products.routed(table, chosen, inputs)

    def child(results: Any) -> None:
        results.put(products.routed(table, chosen, inputs).tolist())

    context = multiprocessing.get_context("fork")
    results = context.Queue()
    process = context.Process(target=child, args=(results,))
    process.start()
    try:
        assert results.get(timeout=60) == expected.tolist()
    finally:
        process.kill()
        process.join()


@pytest.mark.skipif(bool(compiler.problem()) or not Path("/proc/self/maps").exists(), reason="Linux with kernels")
def test_there_is_one_openmp() -> None:
    compiler.library()
    lines = Path("/proc/self/maps").read_text().splitlines()
    assert len({line.split()[-1] for line in lines if "libgomp" in line}) <= 1


@needs_compiler
@pytest.mark.parametrize(("variable", "value"), [("XDG_CACHE_HOME", "planted"), ("XDG_CACHE_HOME", "")])
def test_no_library_of_the_current_directory_is_loaded(
    runs: Path, fresh: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    """A relative cache directory is none, as its specification says."""
    monkeypatch.chdir(fresh)
    monkeypatch.setenv("HOME", str(fresh / "home"))
    monkeypatch.setenv(variable, value)
    assert all(folder.is_absolute() for folder in compiler.cache_directories())
    assert compiler.problem() == ""
    assert not (fresh / "planted").exists()
    assert len(list((fresh / "home" / ".cache" / "moetool").iterdir())) == 1
    monkeypatch.setenv("HOME", ".")
    assert all(folder.is_absolute() for folder in compiler.cache_directories())


def test_a_compiler_with_an_open_quotation_mark_is_none(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", 'g++ "')
    with caplog.at_level(logging.WARNING):
        assert [Path(word).name for word in compiler.compiler_command()] in (["c++"], ["g++"], ["clang++"], [])
    assert 'CXX=g++ " is no command (No closing quotation) and is ignored' in caplog.text
