#!/usr/bin/env bash
# One node of a Ray cluster: the head on the first node of the job, on the others what joins it.
set -uo pipefail
trap : TERM # `vcal` is told at the same time; Ray must be there until it has written
programs=$1 address=$2 folder=$3
# Never one that somebody else has made; nodes that share a file system share the first one's.
if ! mkdir --mode=700 "$folder" 2>/dev/null &&
    ! [[ ! -L $folder && -O $folder && $(stat --format=%a "$folder") == 700 ]]; then
    echo "cannot make $folder on $(hostname): see what stands there, and submit the job again" >&2
    exit 1
fi
echo "$SLURM_STEP_ID" >"$folder/step" # for the batch script, which ends it
node=$SLURM_NODEID cpus=$SLURM_CPUS_ON_NODE gpus=${SLURM_GPUS_ON_NODE:-0}
unset "${!SLURM_@}" # Lightning in Ray's processes would take itself for a task of SLURM

export PATH="$programs:$PATH" RAY_ADDRESS="$address" RAY_gcs_server_port_wait_time_s=120 # the head may start later
options=(--block --disable-usage-stats --num-cpus="$cpus" --num-gpus="$gpus" --object-store-memory=500000000
    --min-worker-port=0 --max-worker-port=0 --dashboard-agent-listen-port=0)
if ((node == 0)); then
    port=${address##*:} # Ray Train asks the dashboard for the state of its own processes
    options+=(--head --node-ip-address="${address%:*}" --port="$port" --temp-dir="$folder"
        --dashboard-port="$((port + 1))" --ray-client-server-port="$((port + 2))")
else
    options+=(--address="$address")
fi
ray start "${options[@]}" >"$folder/start-$node.log" 2>&1
cat "$folder/start-$node.log" >&2 # it only ends by itself when it fails
exit 1
