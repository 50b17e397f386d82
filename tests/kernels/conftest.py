"""Kernels in several sets of instructions."""

import os
import platform
from pathlib import Path

import pytest

from moetool.compiled import compiler

EXTENSIONS = {"x86-64-v3": "avx2", "x86-64": "sse2", "cooperlake": "avx512_bf16"}  # what a machine must have for them


@pytest.fixture(params=["native", "x86-64-v3", "x86-64"])
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Kernels in the instructions of this machine, of any with AVX2, and of any at all."""
    if request.param != "native":
        if platform.machine() != "x86_64" or EXTENSIONS[request.param] not in Path("/proc/cpuinfo").read_text():
            pytest.skip("not a machine that has them")
        command = (os.environ.get("CXX") or "c++").split()
        loaded = compiler.load(command, ("-O1", f"-march={request.param}", "-fopenmp"))
        monkeypatch.setattr(compiler, "_LOADED", [loaded])
    return str(request.param)
