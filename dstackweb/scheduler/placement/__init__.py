"""Where a run can go: pure decisions on plain data, without Django."""
