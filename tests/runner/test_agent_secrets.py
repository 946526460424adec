"""What a job can do with the secrets of the machine that it runs on."""

from __future__ import annotations

from pathlib import Path

import pytest

from dstackweb.runs import logs
from dstackweb.runs.models import Job
from dstackweb.scheduler.cloud.agents import join_token
from standins.aws import Cloud
from tests.runner.test_agent_on_a_cloud import boot, cloud, instance_of, place, server
from tests.support import eventually

__all__ = ["cloud", "server"]
pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.needs("root"),
]

THIEF = """
import json, os, sys, urllib.error, urllib.request

url, token, home = sys.argv[1:]
body = json.dumps({"token": token, "nonce": "mine"}).encode()
try:
    urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"}))
    print("joined")
except urllib.error.HTTPError as error:
    print("join", error.code)
for name in ("token", "nonce", "lock", "runner.pyz", "jobs"):
    try:
        open(os.path.join(home, name))
        print("read", name)
    except PermissionError:
        pass
try:
    print("listed", os.listdir(home))
except PermissionError:
    pass
for pid in filter(str.isdigit, os.listdir("/proc")):
    for name in ("environ", "cmdline", "mem"):
        try:
            with open(f"/proc/{pid}/{name}", "rb") as file:
                said = b"" if name == "mem" else file.read()
            if b"DSTACKWEB_JOIN_TOKEN=" in said:
                print("found", pid, name)
        except OSError:
            pass
print("done")
"""


def test_a_job_can_read_no_token_but_the_used_join_token(cloud: Cloud, server: str) -> None:
    """Whoever runs on a machine can read its user data, and the join token there."""
    job = place("until [ -e go ]; do sleep 0.05; done", "python3 thief.py $(cat asked)")
    instance = instance_of(job).pk
    cloud_id = boot(cloud, job, server)
    eventually(lambda: Job.objects.get(pk=job.pk).status == "running")
    home = Path(cloud.machine(cloud_id)["folder"]) / "root/.dstackweb" / str(instance)
    run_dir = home / "runs" / str(job.run.uid) / "node-0"
    (run_dir / "thief.py").write_text(THIEF)
    (run_dir / "asked").write_text(f"{server}/api/v1/runner/instances/{instance}/join {join_token(instance)[0]} {home}")
    assert (home / "token").exists()
    (run_dir / "go").touch()
    eventually(lambda: Job.objects.get(pk=job.pk).status == "done")
    assert logs.read_log(job.pk, 0, 10000).decode() == "join 409\ndone\n"
