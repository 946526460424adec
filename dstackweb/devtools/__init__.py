"""Stand-ins for a small AWS and for NVIDIA's NVML, shared by tests and demos. Not in the wheel."""
