# shellcheck shell=bash
# The start of a batch script, for `source`: where the first node is, and how SIGTERM comes to a command.

# As SLURM itself reaches the node, whatever the network calls it.
# shellcheck disable=SC2034 # the scripts that source this one use it
address=$(scontrol --oneliner show node "$SLURMD_NODENAME" | sed 's/.* NodeAddr=\([^ ]*\).*/\1/')

# With cgroups SLURM signals the tasks, but not what they have started; in the older ways it signals both.
case $(scontrol show config) in
    *proctrack/linuxproc* | *proctrack/pgid*) ;;
    *) export VCAL_PASS_ON=1 ;;
esac
