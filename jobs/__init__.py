"""What a person or a cluster runs: the `vcal` command and the jobs behind it."""
