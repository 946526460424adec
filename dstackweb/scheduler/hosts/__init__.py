"""Work on and about the team's own hosts: starting jobs, sampling GPUs, checks before a host starts."""
