"""The `dstackweb` command. It speaks to the REST API alone and imports neither Django nor the server's code."""
