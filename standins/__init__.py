"""A small AWS, NVML, and clusters of Slurm, Dask and Ray on this machine: for tests and demos."""
