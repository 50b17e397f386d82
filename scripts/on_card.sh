#!/usr/bin/env bash
# Everything that wants a card, in at most 9 minutes: tests, kernels against eager, layers, stages, decompositions, bench.
#
#   scripts/on_card.sh [--dry] [RESULTS.md]
#
# The most important first; each part has its own limit, and what it found is kept whatever comes after it. Without a card
# the same parts run small on the CPU, and tests that want one are skipped. --dry only looks whether all is there.
# Writes RESULTS.md (scripts/benchmarks/results/on_card.md) and ends with 1 if a part failed. PYTHON says which one to use.
set -u
cd "$(dirname "$0")/.." || exit 2
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" TOKENIZERS_PARALLELISM=false
LIMIT=540 # seconds for everything

dry=
[ "${1:-}" = --dry ] && dry=1 && shift
results=${1:-scripts/benchmarks/results/on_card.md}
python=${PYTHON:-.venv/bin/python}
command -v "$python" >/dev/null || python=python3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

VERSIONS='
import importlib.metadata as metadata, platform, torch
card = torch.cuda.is_available()
named = [torch.cuda.get_device_name()] if card else ["no card"]
print(" / ".join([*named, platform.machine(), f"Python {platform.python_version()}", f"torch {torch.__version__}"]))
for name in ("transformers", "triton", "peft", "accelerate", "bitsandbytes"):
    try: print(name, metadata.version(name))
    except metadata.PackageNotFoundError: print(name, "is not installed")
raise SystemExit(not card)
'
if versions=$("$python" -c "$VERSIONS"); then
  device=cuda small=() forms=() layers=()
else
  device=cpu small=(--small --threads 1) forms=(--forms dense quantised-weight:3:128 sparse:0.9:1)
  layers=(--layers Mixtral-8x7B --forms "hybrid 75 %")
  export OMP_NUM_THREADS=1
fi
pytest=(-m pytest -q -rfE --tb=short -p no:cacheprovider -m cuda)
[ $device = cuda ] && "$python" -c 'import xdist' 2>/dev/null && pytest+=(-n 6)

{
  echo "# On a card"
  echo
  echo "Made by \`scripts/on_card.sh\` at $(git rev-parse --short HEAD 2>/dev/null || echo 'an unknown commit')."
  echo
  echo '```'
  echo "$versions"
  echo '```'
} >"$results"

failed=0
# part NAME SECONDS ARGUMENTS…: runs python with these, and adds to the results how it ended and what it found. Scripts
# write their tables to $work/table.md.
part() {
  local name=$1 limit=$2 code=0 state
  shift 2
  [ $((LIMIT - SECONDS)) -lt "$limit" ] && limit=$((LIMIT - SECONDS))
  local start=$SECONDS
  rm -f "$work/table.md"
  if [ "$limit" -lt 5 ]; then
    state="left out: the time was up"
    failed=1
    : >"$work/log"
  else
    if [ "$dry" ]; then
      ls -d $(printf '%s\n' "$@" | grep -E '^(scripts|tests)/') >"$work/log" 2>&1 || code=$?
    else
      timeout --signal=INT --kill-after=10 "$limit" "$python" "$@" >"$work/log" 2>&1 || code=$?
    fi
    case $code in
      0) state=passed ;;
      124 | 137) state="stopped after $limit s" ;;
      *) state="FAILED with code $code" ;;
    esac
    [ $code -ne 0 ] && failed=1
    [ $code -eq 0 ] && grep -qE '^[0-9]+ skipped' "$work/log" && state="skipped: there is no card"
  fi
  echo "$name: $state, $((SECONDS - start)) s of $limit" >&2
  {
    echo
    echo "## $name: $state"
    echo
    echo "\`python $*\`, $((SECONDS - start)) s of at most $limit."
    echo
    if [ -s "$work/table.md" ]; then
      cat "$work/table.md"
    elif [ $code -eq 0 ]; then
      echo '```'
      tail -n 1 "$work/log"
      echo '```'
    fi
    if [ $code -ne 0 ]; then
      echo '```'
      tail -n 40 "$work/log" | cut -c 1-300
      echo '```'
    fi
  } | sed "s| --output $work/table.md||" >>"$results"
}

benchmarks=scripts/benchmarks
part "Kernels and models" 150 "${pytest[@]}" tests/kernels tests/runtime
part "Kernels against eager" 80 $benchmarks/kernels.py --device $device "${small[@]}" "${forms[@]}" --output "$work/table.md"
part "Stages" 100 "${pytest[@]}" tests/integration/test_cli_cuda.py
part "Layers" 60 $benchmarks/runtime.py --device $device "${small[@]}" "${layers[@]}" --no-model \
  --output "$work/table.md"
part "Decompositions" 20 "${pytest[@]}" tests/numerics/test_cuda.py
part "Speed of decompositions" 40 $benchmarks/decompositions.py --device $device "${small[@]:0:1}" --output "$work/table.md"
part "A whole model, by moetool bench" 80 \
  $benchmarks/runtime.py --device $device "${small[@]}" --layers --forms "hybrid 75 %" --output "$work/table.md"
echo "written to $results" >&2
exit $failed
