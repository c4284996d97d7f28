#!/usr/bin/env bash
# One task of a training: runs a command, and says by its status whether the job should go on later.
#
# 75: the command was told to stop and has written a checkpoint. 76: it was told, and had nothing to write yet.
# Any other failure ends the whole step. (srun's --kill-on-bad-exit would send the other tasks SIGTERM, which they would
# take for an order to write a checkpoint and go on later.)
set -uo pipefail

told='' again='' command=''
trap 'told=1 again=1; [[ -z ${VCAL_PASS_ON-} || -z $command ]] || kill -TERM "$command" 2>/dev/null' TERM
"$@" &
command=$!

wait "$command"
status=$?
while [[ -n $again ]]; do # the signal has ended the waiting, not the command
    again=''
    wait "$command"
    status=$?
done

if ((status == 0 || status == 75)); then
    exit "$status"
elif [[ -n $told ]]; then
    exit 76
fi
echo "task $SLURM_PROCID on $SLURMD_NODENAME failed with status $status" >&2
((SLURM_STEP_NUM_TASKS == 1)) || scancel --signal=KILL "$SLURM_JOB_ID.$SLURM_STEP_ID"
exit "$status"
