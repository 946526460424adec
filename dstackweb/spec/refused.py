"""What other tools' run files have and this one doesn't, and what to do instead. Refused by name, never ignored."""

from __future__ import annotations

REFUSED_TYPES = {
    "service": "write `type: task`, and start the server among its `commands`",
    "dev-environment": "`dstackweb hold` keeps GPUs for you to work on by ssh; in a file, write `type: task`",
    "fleet": "hosts join by `dstackweb host join`, and an admin sets up the other backends",
    "gateway": "there are no services, and so no gateways",
    "volume": "use a directory that the hosts share",
}

_CONTAINER = "build it into the `image`"
_OWN_MACHINE = "jobs see the machine's own"

REFUSED_KEYS = {
    "services": "a run file describes one task; start further processes among its `commands`, or submit them as runs",
    "ports": "nothing is forwarded; a command may listen on the host's own network",
    "volumes": "use a directory that the hosts share, and DSTACK_RUN_DIR for what a run keeps across attempts",
    "files": "`dstackweb apply` sends the working directory along",
    "repos": "`dstackweb apply` sends the working directory along; or clone among the `commands`",
    "python": "name an `image` that has it, or call the interpreter you want in `commands`",
    "nvcc": _CONTAINER,
    "entrypoint": "write it as the first of the `commands`",
    "docker": "nothing may start containers of its own",
    "privileged": "jobs get no rights of the machine's",
    "user": "the host's admin says as whom jobs run",
    "registry_auth": "an admin signs the host in to the registry",
    "fleets": "name `backends`, `regions` or `instance_types`",
    "availability_zones": "name `regions`",
    "reservation": "name `instance_types`",
    "creation_policy": "a free host of one's own is always used first",
    "tags": "put it in the run's `name`",
    "startup_order": "all nodes start at the same time",
    "stop_criteria": "a run has ended when all its nodes have",
    "resources.shm_size": f"{_OWN_MACHINE} /dev/shm",
    "resources.disk": f"{_OWN_MACHINE} disk",
    "resources.gpu.vendor": "only NVIDIA's GPUs are managed; leave it out",
    "resources.gpu.total_memory": "give `memory`, which is each GPU's, and `count`",
    "resources.gpu.compute_capability": "give the names of the GPUs that have it",
}
