#!/usr/bin/env bash
# A batch script: one process of `vcal` for every task of the job; of a job array, one trial of a sweep.
#
#     sbatch OPTIONS lightning.sh FOLDER VCAL ARGUMENTS…        (FOLDER: where this script lies)
#
# Before the time limit, and when the job is preempted, SLURM sends SIGTERM to the tasks. They write a checkpoint and end
# with status 75; the job then goes back into the queue, and goes on from there.
set -uo pipefail
trap : TERM # this script stays until the tasks have written
scripts=$1
shift
# shellcheck source-path=SCRIPTDIR source=start.sh
source "$scripts/start.sh"

[[ -z ${SLURM_ARRAY_TASK_ID-} ]] || set -- "$@" --trial "$SLURM_ARRAY_TASK_ID"
export MASTER_ADDR=$address # where the processes meet
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}" # srun does not take it over from sbatch
srun bash "$scripts/task.sh" "$@"
exec bash "$scripts/end.sh" "$?"
