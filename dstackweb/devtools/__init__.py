"""Stand-ins for what a machine of a developer lacks: a small AWS, and NVIDIA's library. Not in the wheel."""
