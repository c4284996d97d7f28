"""Ways to run `vcal train` and `vcal sweep` elsewhere: Ray Jobs, SLURM, Kubernetes."""
