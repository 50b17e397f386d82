#!/usr/bin/env bash
# Compress a Mixtral overnight: plan, compress, verify, evaluate. Start it again after any interruption and it goes on.
#
#   scripts/compress_mixtral.sh [MODEL [OUTPUT [VARIANT]]]
#
#SBATCH --job-name=moetool
#SBATCH --requeue
#SBATCH --signal=B:TERM@120
set -euo pipefail

model=${1:-mistralai/Mixtral-8x7B-v0.1}
output=${2:-mixtral-8x7b-d2moe}
variant=${3:-d2moe-40}
preset=${PRESET:-${RECIPE:-configs/d2moe.yaml}}:$variant
evaluation=${EVALUATION:-Salesforce/wikitext:wikitext-2-raw-v1:test:text}
length=${EVALUATION_LENGTH:-2048}
read -r -a more <<<"${OPTIONS:-}" # e.g. OPTIONS="--calibration mine.txt --samples 128"

moetool compress "$model" "$output" --preset "$preset" "${more[@]}" --dry-run >&2
status=0
moetool compress "$model" "$output" --preset "$preset" "${more[@]}" --resume & # does nothing if it is finished
job=$!
trap 'kill -TERM "$job"' TERM
wait "$job" || status=$?
if ((status > 128)) && kill -0 "$job" 2>/dev/null; then # the trap ended `wait`, not the job: let it finish its unit
    status=0
    wait "$job" || status=$?
fi
if ((status == 75)); then
    echo "interrupted and resumable" >&2
    if [[ -n ${SLURM_JOB_ID:-} ]]; then scontrol requeue "$SLURM_JOB_ID"; fi
    exit 75
fi
((status == 0)) || exit "$status"
moetool verify "$output" --against "$model" >&2
moetool eval "$output" --data "$evaluation" --sequence-length "$length" --json
