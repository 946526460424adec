"""The run file and what follows from it: pydantic models and pure functions, nothing of Django."""
