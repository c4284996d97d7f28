#!/usr/bin/env bash
# The end of a batch script, with the status of its tasks. 75, told to stop and a checkpoint written, puts the job back
# into the queue; so does 76, told to stop before there was one, but not for ever.
set -uo pipefail
trap : TERM # that putting it back sends
job=$SLURM_JOB_ID
[[ -z ${SLURM_ARRAY_TASK_ID-} ]] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID # one number may name a whole array

# A job that is being cancelled ends with 75 too, but it is no longer running.
if (($1 == 75 || $1 == 76)) && [[ $(squeue --noheader --jobs="$job" --format=%T) == RUNNING ]]; then
    if (($1 == 75 || ${SLURM_RESTART_COUNT:-0} < 3)); then
        echo "job $job goes back into the queue"
        scontrol requeue "$job"
    else
        echo "job $job was stopped four times before it could write a checkpoint; give it more --time" >&2
    fi
fi
exit "$1"
