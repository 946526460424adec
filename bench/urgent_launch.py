"""How soon an urgent run is launched behind runs that find no capacity, by a real server with boto3 over HTTP.

    python -m bench.urgent_launch [sqlite|postgres] [REPEATS [WAITING …]]

The AWS is the small one of standins/aws. It has no instance with a GPU left, and so many runs with priority 0 (WAITING,
by default 0, 10 and 20) ask for any GPU. While the server tries one type after another, a run for two CPUs comes with
priority 100. Measured from its submit by the API to its RunInstances, as the cloud received it. The floor is the same
run alone (0).
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import django

from bench import sides
from standins.aws import Cloud
from tests.server import Server
from tests.support import eventually

REPEATS, WAITING = 5, (0, 10, 20)
REGIONS = ["eu-west-1", "us-east-1"]
GPU_FAMILIES, CPU_FAMILIES = ["g5", "g6", "p4d", "p5"], ["m5", "c7i"]
REFUSED = (5, 10, 15, 20, 25)
"""So many launches are refused before the urgent run comes, differently in each repeat."""


def measure(repeats: int, waiting: list[int]) -> None:
    """Print this side's table."""
    home = Path(os.environ["DSTACKWEB_HOME"])
    home.mkdir(mode=0o755)
    cloud = Cloud.start()
    try:
        server = Server(home, **cloud.env)
        for name in ("DSTACKWEB_HEARTBEAT_S", "DSTACKWEB_WATCH_EVERY_S"):
            del server.env[name]  # as installed, not as in tests
        server.env["DSTACKWEB_PUBLIC_URL"] = server.url
        with server:
            prepare(server, cloud)
            rows = {}
            for number in waiting:
                launches = [launch_behind(server, cloud, number, index) for index in range(repeats)]
                rows[f"{number} runs without capacity" if number else "alone: the floor"] = [
                    sides.cell([seconds for seconds, _ in launches]),
                    sides.cell([calls for _, calls in launches]),
                ]
    finally:
        cloud.stop()
    django.setup()
    heading = f"{sides.database()}, {repeats} repeats"
    sides.table(heading, ["s to its RunInstances", "RunInstances before it"], rows)


def prepare(server: Server, cloud: Cloud) -> None:
    """Add the backend, with CPUs alone to launch, and wait until its offers are known."""
    cloud.times(boot_s=3600, shutdown_s=0.2, grace_s=0.2)
    for code in ("L-1216C47A", "L-DB2E81BA", "L-3819A6DF", "L-417A185B", "L-7212CCBC"):
        cloud.quota(code, 10_000)
    families = [*GPU_FAMILIES, *CPU_FAMILIES]
    config = {"regions": REGIONS, "families": families, "allow_private_url": True}
    answer = server.http.put("/backends/aws", json={"type": "aws", "config": config})
    assert answer.is_success, answer.text

    eventually(lambda: all(source["state"] == "fresh" for source in aws_offers(server)["sources"]))
    for instance_type in {offer["instance_type"] for offer in aws_offers(server, gpu="1..")["items"]}:
        cloud.capacity(0, instance_type)


def launch_behind(server: Server, cloud: Cloud, waiting: int, repeat: int) -> tuple[float, float]:
    """The seconds from the urgent run's submit to its launch, and how many launches were tried between them."""
    cloud.forget_calls()
    for _ in range(waiting):
        submit(server, resources={"gpu": "1.."})
    if waiting:
        refused = REFUSED[repeat % len(REFUSED)]
        eventually(lambda: cloud.count("ec2", "RunInstances") >= refused, every=0.02)
        time.sleep(repeat % 4 / 4)  # the rate limit allows one a second in each region
    submitted = time.time()
    submit(server, resources={"cpu": "2"}, priority=100)

    def tried() -> list[dict[str, Any]] | None:
        """The launches up to the one that succeeds."""
        calls = cloud.calls("ec2", "RunInstances", since=submitted)
        launched = [index for index, call in enumerate(calls) if not call["code"]]
        return calls[: launched[0] + 1] if launched else None

    calls = eventually(tried, deadline=300)
    begin_anew(server, cloud)
    return calls[-1]["at"] - submitted, len(calls) - 1


def begin_anew(server: Server, cloud: Cloud) -> None:
    """Stop all runs, and have the server forget what the cloud refused."""

    def going() -> list[str]:
        runs = server.api("GET", "runs", params={"limit": 100}).json()["items"]
        return [run["name"] for run in runs if run["status"] not in ("done", "failed", "terminated")]

    for name in going():
        server.http.post(f"/projects/main/runs/{name}/stop", json={"abort": True})
    eventually(lambda: not going())
    eventually(lambda: all(machine["state"] == "terminated" for machine in cloud.machines()))
    server.api("POST", "offers/refresh")
    eventually(lambda: not any(source["requested"] for source in aws_offers(server)["sources"]))


def aws_offers(server: Server, **params: str) -> dict[str, Any]:
    answer: dict[str, Any] = server.api("GET", "offers", params={"backend": "aws", **params}).json()
    return answer


def submit(server: Server, **keys: Any) -> None:
    server.submit("true", backends=["aws"], idle_duration="off", **keys)


if __name__ == "__main__":
    if sides.here():
        numbers = [int(word) for word in sys.argv[1:]]
        measure(numbers[0] if numbers else REPEATS, numbers[1:] or list(WAITING))
    else:
        sides.on_each_side(sys.argv[1:])
