"""Cloud instances of runs: starting, polling and ending them, and the orders of their agents."""
