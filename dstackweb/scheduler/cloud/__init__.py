"""Cloud instances of runs: ordering, polling and ending them, and what their agents are told."""
