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

# Several jobs, and users, may share a node: ports from the job's number, files in a folder whose name nobody knows
# before, and a token that everybody who joins or asks the cluster must have. The environment is the user's alone.
read -r address _ < <(getent ahostsv4 "$address")
# A node may know its own name as the loopback's.
if [[ -z ${address-} || ($address == 127.* && $SLURM_JOB_NUM_NODES -gt 1) ]]; then
    read -r address _ < <(hostname -I)
fi
address="$address:$((25000 + SLURM_JOB_ID % 2300 * 3))"
folder=$(mktemp --dry-run --directory /tmp/vcal-ray-XXXXXXXXXX) # made on every node; sockets below need a short name
RAY_AUTH_TOKEN=$(od --address-radix=n --format=x1 --read-bytes=32 /dev/urandom | tr -d ' \n')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
unset RAY_AUTH_TOKEN_PATH

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
