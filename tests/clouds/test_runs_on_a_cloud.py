"""Runs on machines of a cloud that really boot: real processes here, real boto3, and a small AWS on loopback."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from standins.aws import Cloud
from tests.server import Server
from tests.support import eventually

pytestmark = [pytest.mark.nightly, pytest.mark.xdist_group("cloud")]

SHORT = {
    "DSTACKWEB_HEARTBEAT_S": "0.5",
    "DSTACKWEB_WATCH_EVERY_S": "0.3",
    "DSTACKWEB_PASS_EVERY_S": "0.5",
    "DSTACKWEB_LOST_AFTER_S": "4",
    "DSTACKWEB_HOST_SILENT_S": "2",
}
CONFIG = {"regions": ["us-east-1"], "families": ["c5", "m5"], "allow_private_url": True, "disk_gb": 8}
ASKS = {"backends": ["aws"], "resources": {"cpu": "2..", "memory": "2GB.."}, "idle_duration": "off"}
BOOTED_S = 60.0


class Site:
    """A deployment with a cloud for its backend `aws`."""

    def __init__(self, server: Server, cloud: Cloud) -> None:
        self.server, self.cloud = server, cloud

    def submit(self, *commands: str, **keys: Any) -> str:
        return self.server.submit(*commands, **ASKS | keys)

    def running(self) -> list[str]:
        """The IDs of machines that run."""
        return [machine["id"] for machine in self.cloud.machines() if machine["state"] == "running"]

    def known(self) -> set[str]:
        """The IDs of all machines ever started."""
        return {machine["id"] for machine in self.cloud.machines()}

    def offers(self, **params: str) -> dict[str, Any]:
        answer: dict[str, Any] = self.server.api("GET", "offers", params={"backend": "aws", **params}).json()
        return answer

    def all_known(self) -> bool:
        """Whether each source of its offers has been read."""
        sources = self.offers()["sources"]
        return bool(sources) and all(source["state"] != "failed" for source in sources)

    def all_gone(self) -> bool:
        return all(machine["state"] == "terminated" for machine in self.cloud.machines())

    def events(self, name: str, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.server.run(name)["events"] if event["kind"] == kind]


@pytest.fixture(scope="module")
def running() -> Iterator[Site]:
    with tempfile.TemporaryDirectory(prefix="clouds-", dir=os.environ["DSTACKWEB_TEST_HOME"]) as folder:
        Path(folder).chmod(0o755)
        home = Path(folder, "home")
        home.mkdir()
        home.chmod(0o755)
        cloud = Cloud.start(Path(folder, "cloud"))
        server = Server(home, **SHORT, **cloud.env)
        server.env["DSTACKWEB_PUBLIC_URL"] = server.url
        try:
            with server:
                answer = server.http.put("/backends/aws", json={"type": "aws", "config": CONFIG})
                assert answer.is_success, answer.text
                yield Site(server, cloud)
        finally:
            cloud.stop()


@pytest.fixture
def site(running: Site) -> Iterator[Site]:
    running.cloud.times(boot_s=0.2, shutdown_s=0.2, grace_s=1)
    eventually(running.all_known)
    yield running
    for run in running.server.api("GET", "runs").json()["items"]:
        if run["status"] not in ("done", "failed", "terminated"):
            # One that ends meanwhile can't be stopped.
            running.server.http.post(f"/projects/main/runs/{run['name']}/stop", json={"abort": True})
    running.cloud.capacity(None)
    eventually(running.all_gone, deadline=BOOTED_S)


def test_a_run_is_queued_and_done_on_an_instance_that_is_terminated_after_it(site: Site) -> None:
    name = site.submit("echo hello from a cloud", "pwd", "sleep 1")
    run = site.server.wait(name, deadline=BOOTED_S)
    assert (run["status"], run["termination_reason"]) == ("done", "all_jobs_done")
    assert b"hello from a cloud" in site.server.log(name)
    job = run["jobs"][0]
    assert (job["backend"], job["region"]) == ("aws", "us-east-1")
    assert float(job["price"]) > 0
    eventually(site.all_gone)
    [machine] = site.cloud.machines()[-1:]
    assert machine["type"] == job["instance_type"]
    [started] = site.events(name, "machine_started")
    assert started["data"]["instance_type"] == job["instance_type"]
    assert started["data"]["cloud_id"].startswith("i-")


def test_a_stopped_run_gets_sigterm_and_its_instance_is_terminated(site: Site) -> None:
    name = site.submit("trap 'echo asked to stop; exit 0' TERM", "echo up", "while :; do sleep 0.1 || :; done")
    site.server.wait(name, "running", deadline=BOOTED_S)
    eventually(lambda: b"up" in site.server.log(name))
    site.server.api("POST", f"runs/{name}/stop")
    run = site.server.wait(name)
    assert (run["status"], run["termination_reason"]) == ("terminated", "stopped_by_user")
    assert b"asked to stop" in site.server.log(name)
    eventually(site.all_gone)


def test_an_offer_without_capacity_is_recorded_and_the_next_is_taken(site: Site) -> None:
    offers = eventually(lambda: site.offers(cpu="2..", spot="false")["items"])
    site.cloud.capacity(0, offers[0]["instance_type"])
    name = site.submit("true")
    run = site.server.wait(name, deadline=BOOTED_S)
    assert run["status"] == "done"
    assert run["jobs"][0]["instance_type"] != offers[0]["instance_type"]
    [failed] = site.events(name, "offer_failed")
    assert failed["data"]["instance_type"] == offers[0]["instance_type"]
    assert failed["data"]["code"] == "no_capacity"


def test_a_slow_cloud_does_not_delay_runs_on_own_hosts(site: Site) -> None:
    before = site.known()
    site.cloud.latency(30, "ec2", "RunInstances")
    try:
        names = [site.submit("true") for _ in range(4)]
        for name in names:
            site.server.wait(name, "provisioning")
        own = site.server.wait(site.server.submit("true"))
        assert (own["status"], site.known()) == ("done", before)
    finally:
        site.cloud.latency(0, "ec2", "RunInstances")
    assert {site.server.wait(name, deadline=2 * BOOTED_S)["status"] for name in names} == {"done"}


def test_an_interrupted_spot_job_saves_its_checkpoint_and_the_next_attempt_resumes(
    site: Site,
) -> None:
    storage = site.server.home / "storage"  # what both machines reach
    storage.mkdir()
    storage.chmod(0o777)
    name = site.submit(
        f"if ! mkdir {storage}/begun; then echo again; exit 0; fi",
        "trap 'echo saved; exit 1' TERM",
        "echo up",
        "while :; do sleep 0.1 || :; done",
        spot_policy="spot",
        retry={"on_events": ["interruption"]},
    )
    site.server.wait(name, "running", deadline=BOOTED_S)
    eventually(lambda: b"up" in site.server.log(name, attempt=1))
    [machine] = site.running()
    site.cloud.interrupt(machine, notice_s=15)
    site.server.hurry_retry(name)
    run = site.server.wait(name, deadline=BOOTED_S)
    assert run["status"] == "done"
    assert b"saved" in site.server.log(name, attempt=1)
    assert b"again" in site.server.log(name, attempt=2)
    assert site.events(name, "spot_interruption")


def test_an_idle_instance_serves_the_next_run_of_its_project(site: Site) -> None:
    before = site.known()
    first = site.submit("true", idle_duration="2m")
    site.server.wait(first, "done", deadline=BOOTED_S)
    idle = 'dstackweb_instances{backend="aws",status="idle"} 1.0'
    eventually(lambda: idle in site.server.metrics())
    second = site.submit("echo again", idle_duration="off")
    run = site.server.wait(second, deadline=BOOTED_S)
    assert run["status"] == "done"
    assert len(site.known() - before) == 1
    eventually(site.all_gone)


def test_an_instance_without_heartbeats_is_terminated_and_its_run_fails(site: Site) -> None:
    name = site.submit("echo up", "sleep 600", stop_duration="1s")
    site.server.wait(name, "running", deadline=BOOTED_S)
    [machine] = site.running()
    site.cloud.crash(machine)
    run = site.server.wait(name, deadline=150)
    assert (run["status"], run["jobs"][0]["termination_reason"]) == ("failed", "instance_unreachable")
    eventually(site.all_gone)


def test_workers_killed_during_launches_leave_one_instance_per_run(site: Site) -> None:
    before = site.known()
    site.cloud.forget_calls()
    site.cloud.latency(1, "ec2", "RunInstances")
    names = [site.submit("sleep 1") for _ in range(3)]
    for _ in range(2):
        asked = site.cloud.count("ec2", "RunInstances")
        eventually(lambda asked=asked: site.cloud.count("ec2", "RunInstances") > asked)
        site.server.kill_workers()
    site.cloud.latency(0, "ec2", "RunInstances")
    for name in names:
        assert site.server.wait(name, deadline=120)["status"] == "done"
    assert len(site.known() - before) == 3


def ends_once(site: Site, *before: str, **keys: Any) -> str:
    """Submit a run whose second attempt is done at once; its name, once the first one is up."""
    storage = site.server.home / "shared"  # what all machines reach
    storage.mkdir(exist_ok=True)
    storage.chmod(0o777)
    mark = storage / f"begun-{len(site.known())}"
    name = site.submit(
        f"if ! mkdir {mark}; then echo again; exit 0; fi",
        *before,
        "echo up",
        "while :; do sleep 0.1; done",
        **{"retry": {"on_events": ["interruption"]}} | keys,
    )
    site.server.wait(name, "running", deadline=BOOTED_S)
    eventually(lambda: b"up" in site.server.log(name, attempt=1))
    return name


@pytest.mark.parametrize("trap", ["", "trap 'echo stopped; exit 1' TERM"])
def test_an_instance_terminated_in_the_console_is_an_interruption(site: Site, trap: str) -> None:
    name = ends_once(site, *filter(None, [trap]))
    [machine] = site.running()
    site.cloud.client("ec2").terminate_instances(InstanceIds=[machine])
    site.server.hurry_retry(name)
    run = site.server.wait(name, deadline=BOOTED_S)
    assert (run["status"], len(site.events(name, "retry"))) == ("done", 1)
    assert site.events(name, "retry")[0]["data"]["job_reason"] == "instance_unreachable"


def test_a_spot_instance_reclaimed_before_its_agent_saw_the_notice_is_an_interruption(site: Site) -> None:
    name = ends_once(site, spot_policy="spot")
    [machine] = site.running()
    site.cloud.interrupt(machine, notice_s=0.3)
    site.server.hurry_retry(name)
    run = site.server.wait(name, deadline=BOOTED_S)
    assert run["status"] == "done"
    assert site.events(name, "retry")[0]["data"]["job_reason"] == "interrupted_by_no_capacity"


def test_a_job_killed_on_a_healthy_instance_fails_by_itself(site: Site) -> None:
    name = site.submit("kill -9 $$", retry={"on_events": ["interruption"]})
    run = site.server.wait(name, deadline=BOOTED_S + 30)
    assert (run["status"], run["exit_code"]) == ("failed", 137)
    assert run["jobs"][0]["termination_reason"] == "container_exited_with_error"
    assert len(site.events(name, "machine_asked")) == 1
