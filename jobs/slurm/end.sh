#!/usr/bin/env bash
# The end of a batch script, with the status of its tasks: 75 puts the job back into the queue.
set -uo pipefail
trap : TERM # that putting it back sends

# A job that is being cancelled ends with 75 too, but it is no longer running.
if (($1 == 75)) && [[ $(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T) == RUNNING ]]; then
    echo "job $SLURM_JOB_ID goes back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$1"
