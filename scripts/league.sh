#!/usr/bin/env bash
# The league: other tools beside moetool in as many bytes, on small models that are trained here first.
#
#   scripts/league.sh TEXT TEST[,OTHER…] [MODEL …]
#
# TEXT trains the models and calibrates all tools; TEST is text of its kind, OTHER of other kinds. Each MODEL, a small MoE
# checkpoint, takes part as well. Wants moetool's test environment as `python`. Makes an environment of 2 GB with the
# other tools, the models and all results in WORK (build/league), in hours on a laptop; a run that was stopped goes on
# where it was. The table is WORK/league.md. PEERS, SCHEMES, KINDS and WINDOWS choose less.
set -euo pipefail
text=$(realpath "${1:?which text}") tests=${2:?which test text}
shift 2
work=${WORK:-build/league} peers=$(dirname "$0")/benchmarks/peers
mkdir -p "$work"
if [ ! -e "$work/environment/ready" ]; then
  python -m venv "$work/environment"
  "$work/environment/bin/pip" install --quiet -r "$peers/requirements.txt"
  touch "$work/environment/ready"
fi
models=("$@")
for kind in ${KINDS:-granitemoe olmoe qwen3-moe deepseek-v3}; do
  [ -e "$work/$kind/config.json" ] || python "$(dirname "$0")/train_small.py" "$kind" "$text" "$work/$kind" --steps 500
  models+=("$work/$kind")
done
python "$(dirname "$0")/benchmarks/peers.py" "${models[@]}" --python "$work/environment/bin/python" \
  --calibration "$text" --data "$tests" --peers "${PEERS:-autoround,autoround-best,hqq,nf4}" \
  --schemes "${SCHEMES:-2:128,3:128,4:64}" --windows "${WINDOWS:-100}" \
  --own "--method hybrid" "--method auto" "--method auto --effort best" --work "$work" --output "$work/league.md"
