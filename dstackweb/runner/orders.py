"""What the host tells a runner (on its standard input), and what the API tells it (the spec)."""

from __future__ import annotations

import json
from typing import Any, NamedTuple


class Orders(NamedTuple):
    """Which job, where the API is, and where things lie on this machine. The token is the job's own."""

    api: str
    job: str
    token: str
    state_dir: str
    run_dir: str
    user: str | None = None
    path: str = "/usr/local/bin:/usr/bin:/bin"


class Spec(NamedTuple):
    """What to execute. Durations are seconds, `log_limit` bytes; None means no limit."""

    commands: list[str]
    run: str = ""
    run_uid: str = ""
    node: int = 0
    shell: str = "/bin/sh"
    working_dir: str | None = None
    env: dict[str, str] = {}
    redact: list[str] = []
    setup: str = ""
    image: str | None = None
    gpus: list[str] = []
    nodes: int = 1
    master_ip: str = "127.0.0.1"
    gpus_per_node: int = 0
    gpus_total: int = 0
    archive: dict[str, Any] | None = None
    max_duration_s: float | None = None
    stop_duration_s: float = 20
    lost_after_s: float | None = None
    log_limit: int = 100 << 20
    tasks_url: str = ""
    tasks_token: str = ""


def parse_orders(raw: bytes) -> Orders:
    """The orders from one JSON object. Raises ValueError that names what is wrong."""
    data = json.loads(raw)
    if not isinstance(data, dict):
        raise ValueError("the orders must be one JSON object")
    needed = [name for name in Orders._fields if name not in Orders._field_defaults]
    if missing := [name for name in needed if not isinstance(data.get(name), str)]:
        raise ValueError(f"the orders lack {', '.join(missing)}")
    return Orders(**_known(Orders._fields, data))


def parse_spec(data: dict[str, Any]) -> Spec:
    """The spec from the API's answer; what a newer API adds is not looked at."""
    return Spec(**_known(Spec._fields, data))


def _known(names: tuple[str, ...], data: dict[str, Any]) -> dict[str, Any]:
    """The entries of these names; null stands for a field's default."""
    return {name: data[name] for name in names if data.get(name) is not None}
