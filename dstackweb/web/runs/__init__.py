"""Pages for runs: submitting, details, logs, why a run waits."""
