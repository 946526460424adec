"""Runs and queues: submitting, ordering, moving and ending them."""
