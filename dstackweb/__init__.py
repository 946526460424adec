"""dstackweb: a web dashboard and scheduler that lets a team share its GPUs."""

__version__ = "0.1.0rc1"
