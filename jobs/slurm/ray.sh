#!/usr/bin/env bash
# A batch script: a Ray cluster on the nodes of the job, and `vcal` on the first of them.
#
#     sbatch OPTIONS ray.sh FOLDER VCAL ARGUMENTS…        (FOLDER: where this script lies)
#
# `ray symmetric-run` would do the same, but it stops every Ray that the user has on these nodes, dies of SIGTERM, and
# succeeds when Ray has not started.
set -uo pipefail
trap : TERM # this script stays until `vcal` has ended
scripts=$1 programs=$(dirname "$2")
shift

# shellcheck source-path=SCRIPTDIR source=start.sh
source "$scripts/start.sh"

# Several jobs may share a node: ports from the job's number, files in a folder of its own.
read -r address _ < <(getent ahostsv4 "$address")
# A node may know its own name as the loopback's.
if [[ -z ${address-} || ($address == 127.* && $SLURM_JOB_NUM_NODES -gt 1) ]]; then
    read -r address _ < <(hostname -I)
fi
address="$address:$((25000 + SLURM_JOB_ID % 2300 * 3))"
folder="/tmp/vcal-ray-$SLURM_JOB_ID"

srun --overlap --ntasks-per-node=1 --cpu-bind=none bash "$scripts/ray_node.sh" "$programs" "$address" "$folder" &
status=1
if "$programs/python" -m jobs.submission.ray_nodes "$address" "$SLURM_JOB_NUM_NODES" "$!"; then
    srun --overlap --nodes=1 --ntasks=1 bash "$scripts/task.sh" "$@" --address "$address"
    status=$?
fi
echo "stopping Ray"
scancel --signal=KILL "$SLURM_JOB_ID.$(<"$folder/step")"
wait
srun --overlap --ntasks-per-node=1 rm -rf -- "$folder"
exec bash "$scripts/end.sh" "$status"
