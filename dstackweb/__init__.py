"""dstackweb: a web dashboard and scheduler that lets a team share its GPUs."""
