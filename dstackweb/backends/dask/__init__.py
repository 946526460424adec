"""Dask clusters: free workers as offers, tasks that hold a worker's thread as instances."""
