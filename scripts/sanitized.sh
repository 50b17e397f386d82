#!/usr/bin/env bash
# Runs the tests of all compiled code with AddressSanitizer and UndefinedBehaviorSanitizer: an access out of bounds or an overflow ends them.
#
#   scripts/sanitized.sh [PYTEST ARGUMENTS]
#
# Compiles a library of its own, in minutes, below build/sanitized. Wants g++ and its sanitizers, and moetool's test
# environment as `python`.
set -euo pipefail
cd "$(dirname "$0")/.."
export XDG_CACHE_HOME=$PWD/build/sanitized OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONPATH=$PWD
export CXX="g++ -fsanitize=address,undefined -fno-sanitize-recover=undefined -g1"
mkdir -p "$XDG_CACHE_HOME"
# The sanitizers have to be in the process before anything else is.
runtime="$(g++ -print-file-name=libasan.so):$(g++ -print-file-name=libubsan.so):$(g++ -print-file-name=libstdc++.so)"
run='
import sys
import pytest
from moetool.compiled import compiler
compiler._SECONDS = 1800
sys.exit(pytest.main(["-q", "-x", "-s", "-p", "no:cacheprovider", *sys.argv[1:]]))
'
[ $# -gt 0 ] || set -- tests/kernels tests/export/test_coding.py tests/numerics/test_trellis.py tests/numerics/test_error_feedback.py
compile='
from moetool.compiled import compiler
compiler._SECONDS = 1800
compiler.load(compiler.compiler_command(), ("-march=native", "-fopenmp"))
'
python -c "$compile" 2>/dev/null || true # it is made here, and loads only below
ls "$XDG_CACHE_HOME"/moetool/*.so >/dev/null
ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD=$runtime python -c "$run" "$@"
