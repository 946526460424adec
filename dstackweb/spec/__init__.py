"""The run file: pydantic models and pure functions, without Django."""
