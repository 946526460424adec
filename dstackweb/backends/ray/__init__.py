"""Ray clusters (docs/ray.md): a run becomes a job of the Jobs API that starts an agent."""
