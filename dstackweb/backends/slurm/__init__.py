"""Slurm clusters (docs/slurm.md): a run becomes a batch job that starts an agent."""
