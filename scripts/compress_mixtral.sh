#!/usr/bin/env bash
# Compress a Mixtral overnight: plan, compress, verify, evaluate. Start it again after any interruption and it goes on.
#
#   scripts/compress_mixtral.sh [MODEL [OUTPUT [VARIANT]]]
#   sbatch --nodes 4 --ntasks-per-node 2 scripts/compress_mixtral.sh MODEL OUTPUT VARIANT
#
# Several tasks share the compression, if its method lets them (docs/jobs.md). MODEL, OUTPUT and the calibration text
# then lie where all nodes find them.
#
#SBATCH --job-name=moetool
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@120
set -euo pipefail

model=${1:-mistralai/Mixtral-8x7B-v0.1}
output=${2:-mixtral-8x7b-d2moe}
variant=${3:-d2moe-40}
preset=${PRESET:-${RECIPE:-configs/d2moe.yaml}}:$variant
evaluation=${EVALUATION:-Salesforce/wikitext:wikitext-2-raw-v1:test:text}
length=${EVALUATION_LENGTH:-2048}
read -r -a more <<<"${OPTIONS:-}" # e.g. OPTIONS="--calibration mine.txt --samples 128"

launch=()
stop() { kill -TERM "$job"; }
if ((${SLURM_NTASKS:-1} > 1)); then
    nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    export MASTER_ADDR=${nodes%%$'\n'*} MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
    # A task that fails takes the others down itself, and they say with which code. What they know is known in the task.
    # shellcheck disable=SC2016
    launch=(srun --kill-on-bad-exit=0 --wait=300 bash -c 'RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS \
        LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=${SLURM_STEP_TASKS_PER_NODE%%[(,]*} exec "$@"' task)
    stop() { scancel --signal=TERM "$SLURM_JOB_ID"; } # srun itself would kill the tasks
fi

moetool compress "$model" "$output" --preset "$preset" "${more[@]}" --dry-run >&2
status=0
# It does nothing if it is finished.
"${launch[@]}" moetool compress "$model" "$output" --preset "$preset" "${more[@]}" --resume &
job=$!
trap stop TERM
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
