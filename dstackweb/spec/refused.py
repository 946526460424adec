"""Keys and types of other tools that are not supported, and what to use instead. They are refused, not ignored."""

from __future__ import annotations

REFUSED_TYPES = {
    "service": "use `type: task`, and start the server in its `commands`",
    "dev-environment": "use `dstackweb hold` to get GPUs for interactive work; in a file, use `type: task`",
    "fleet": "add hosts with `dstackweb host join`; admins set up cloud backends",
    "gateway": "services are not supported, so gateways are not needed",
    "volume": "use a directory that your hosts share",
}

_CONTAINER = "build it into the `image`"
_OWN_MACHINE = "jobs use the host's own"

REFUSED_KEYS = {
    "services": "a run file has one task; start other processes in its `commands`, or submit more runs",
    "ports": "ports are not forwarded; commands listen on the host's own network",
    "volumes": "use a directory that your hosts share, or DSTACK_RUN_DIR for files that all attempts of a run use",
    "files": "`dstackweb apply` uploads the current directory",
    "repos": "`dstackweb apply` uploads the current directory; or clone in the `commands`",
    "python": "use an `image` that has it, or call the interpreter in `commands`",
    "nvcc": _CONTAINER,
    "entrypoint": "write it as the first of the `commands`",
    "docker": "jobs can't start containers",
    "privileged": "jobs get no privileges on the host",
    "user": "the host's admin sets the user of jobs",
    "registry_auth": "an admin logs the host in to the registry",
    "fleets": "use `backends`, `regions` or `instance_types`",
    "availability_zones": "use `regions`",
    "reservation": "use `instance_types`",
    "creation_policy": "free hosts are always used before cloud instances",
    "tags": "put them into the run's `name`",
    "startup_order": "all nodes start together",
    "stop_criteria": "a run ends when all its nodes have ended",
    "resources.shm_size": f"{_OWN_MACHINE} /dev/shm",
    "resources.disk": f"{_OWN_MACHINE} disk",
    "resources.gpu.vendor": "only NVIDIA GPUs are supported; remove this key",
    "resources.gpu.total_memory": "use `memory` (of each GPU) and `count`",
    "resources.gpu.compute_capability": "use the names of GPUs that have it",
}
