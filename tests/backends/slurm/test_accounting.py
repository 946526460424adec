"""What Slurm's accounting says about jobs: sacct's lines, in the form of Slurm 22.05, and a real slurmdbd."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dstackweb.backends import registry, services
from dstackweb.backends.contract import InstanceUsage, SourceFailed, SourceFailure
from dstackweb.backends.slurm import commands
from dstackweb.wording import units
from standins.programs import require
from standins.slurm import Slurm
from tests.server import Server
from tests.support import eventually

LINES = """\
7|COMPLETED|3600|28800|02:59:58||billing=12,cpu=8,energy=540000,gres/gpu:a100=2,mem=16000M,node=1|540000||u-7
7.batch|COMPLETED|3600|28800|02:59:58|11811160064|cpu=8,mem=16000M,node=1|540000|cpu=03:00:00,fs/disk=1,mem=118111|batch
7.extern|COMPLETED|3600|28800|00:00:00|0|billing=12,cpu=8,mem=16000M,node=1|0|cpu=00:00:00,energy=0|extern
8|CANCELLED by 1000|10|40|00:00:00||billing=4,cpu=4,mem=4000M,node=1|||u-8
8.batch|CANCELLED|10|40|00:00:00||cpu=4,mem=4000M,node=1|0||batch
9|RUNNING|60|60|00:00:00||billing=1,cpu=1|||u-9
10|PENDING|0|0|00:00:00|||0||u-10
11|OUT_OF_MEMORY|90000|90000|1-00:30:00.500||cpu=1,mem=1G,node=1|||u-11
11.batch|OUT_OF_MEMORY|90000|90000|1-00:30:00.500|219876K|cpu=1,mem=1G||cpu=1-00:29:59|batch
"""
SEVEN = InstanceUsage(3600, 28800, 10800.0, 11264, 12.0, 540000)


def test_sacct_reports_what_ended_jobs_used() -> None:
    assert commands.usage(LINES, measured=True) == {
        "7-u-7": SEVEN,
        "8-u-8": InstanceUsage(10, 40, None, None, 0.011, None),
        "11-u-11": InstanceUsage(90000, 90000, 88200.5, 215, None, None),
    }


def test_what_slurm_has_measured_of_a_part_of_the_processes_is_unknown() -> None:
    assert commands.usage(LINES, measured=False)["7-u-7"] == InstanceUsage(3600, 28800, None, None, 12.0, 540000)


@pytest.mark.parametrize(
    "line",
    ["", "|||||||||", "8", "8|COMPLETED", "8|COMPLETED|1|1|00:01|1K|billing=1|0|", "--me|COMPLETED|1|1|00:01|||0||u-8",
     "8;rm|COMPLETED|1|1|00:01|||0||u-8", "8.batch|COMPLETED|1|1|00:01|1K|cpu=1|0||batch",
     "sacct: error: no|COMPLETED"],
)  # fmt: skip
def test_a_line_that_is_no_jobs_is_left_out(line: str) -> None:
    seven = "7|COMPLETED|1|2|00:01||billing=3600|4||u-7\n7.batch|COMPLETED|1|2|00:01|3K||4||batch"
    assert commands.usage(f"{line}\n{seven}\n", measured=True) == {"7-u-7": InstanceUsage(1, 2, 1.0, 1, 1.0, 4)}


@pytest.mark.parametrize(
    "odd", ["-1", "1e9", "NaN", "inf", "9" * 40, "٣", "0x10", "1:2:3:4:5", "..", "<b>", "Unknown", "billing=x", "cpu=-"]
)
def test_what_is_no_number_is_unknown(odd: str) -> None:
    rest = "|".join([odd] * 7)
    lines = f"7|FAILED|{rest}|u-7\n7.batch|FAILED|{rest}|batch"
    assert commands.usage(lines, measured=True) == {"7-u-7": InstanceUsage()}


@pytest.mark.parametrize(
    ("usage", "text"),
    [
        ({"cpu_used_s": 10800.0, "cpu_reserved_s": 28800}, "used 3 CPU-h of 8 CPU-h reserved"),
        ({"cpu_used_s": 2.064, "cpu_reserved_s": 90, "billed_h": 0.025}, "used 2.1 CPU-s of 1.5 CPU-min reserved"),
        ({"cpu_reserved_s": 36000, "memory_peak_mib": 215}, "reserved 10 CPU-h, at most 215 MB"),
        ({"cpu_reserved_s": 3600, "energy_j": 540000, "billed_h": 12.0}, "reserved 1 CPU-h, 150 Wh, billed as 12 h"),
        ({"elapsed_s": 0, "cpu_reserved_s": 0, "billed_h": 0.0}, ""),
        ({}, ""),
        (None, ""),
    ],
)
def test_usage_is_worded_in_one_line(usage: dict[str, Any] | None, text: str) -> None:
    assert units.used(usage) == text


@pytest.mark.django_db
def test_sacct_is_asked_for_all_jobs_at_once_and_may_have_no_answer(tmp_path: Path, monkeypatch: Any) -> None:
    backend, _is_new = services.put("cluster", "slurm", {"projects": ["main"], "partitions": ["gpu"]})
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def ask(script: str, gather: str = "cgroup", storage: str = "accounting_storage/slurmdbd") -> Any:
        config = f"echo 'AccountingStorageType   = {storage}'; echo 'JobAcctGatherType = jobacct_gather/{gather}'"
        for name, lines in (("scontrol", config), ("sacct", script)):
            (tmp_path / name).write_text(f"#!/bin/sh\n{lines}\n")
            (tmp_path / name).chmod(0o755)
        return registry.accounting(backend).accounting("gpu", ["7-u-7", "8-u-8"])

    answers = f"echo $* >{tmp_path}/asked; cat <<'E'\n{LINES}E"
    assert ask(answers)["7-u-7"] == SEVEN
    assert "--jobs=7,8 " in (tmp_path / "asked").read_text()
    assert ask(answers, gather="linux")["7-u-7"].cpu_used_s is None
    assert ask("") == {}
    assert ask("exit 1", storage="accounting_storage/none") is None
    assert ask("exit 1", storage="(null)") is None
    for said, code in {
        "sacct: error: Problem talking to the database: Connection refused": SourceFailure.UNREACHABLE,
        "sacct: fatal: Bad job/step specified: 7": SourceFailure.SERVICE_ERROR,
    }.items():
        with pytest.raises(SourceFailed) as failed:
            ask(f"echo '{said}' >&2; exit 1")
        assert failed.value.code == code


@pytest.fixture
def site() -> Iterator[tuple[Server, Slurm]]:
    """A server, and a Slurm with a slurmdbd."""
    require("root", "slurm", "slurmdbd")
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        home = Path(folder, "home")
        home.mkdir(mode=0o755)
        slurm = Slurm(Path(folder, "cluster"), accounting=True)
        quick = {"DSTACKWEB_HEARTBEAT_S": "0.5", "DSTACKWEB_WATCH_EVERY_S": "0.3", "DSTACKWEB_PASS_EVERY_S": "0.5"}
        server = Server(home, **quick, **slurm.env)
        server.env["DSTACKWEB_PUBLIC_URL"] = server.url
        try:
            slurm.start()
            with server:
                yield server, slurm
        finally:
            slurm.stop()


@pytest.mark.nightly
@pytest.mark.xdist_group("slurm")
def test_a_run_shows_why_slurm_keeps_it_waiting_and_what_it_used(site: tuple[Server, Slurm]) -> None:
    """Its reservation begins in an hour, until that is changed."""
    server, slurm = site
    slurm.command("scontrol", "create", "reservation=soon", "starttime=now+1hour", "duration=600", "users=root",
                  "nodes=n1")  # fmt: skip
    config = {"projects": ["main"], "partitions": ["main"], "reservation": "soon"}
    answer = server.http.put("/backends/cluster", json={"type": "slurm", "config": config})
    assert answer.is_success, answer.text
    eventually(lambda: server.api("GET", "offers", params={"backend": "cluster"}).json()["items"])
    burn = "python3 -c 'import time; x = bytearray(200 << 20)\nwhile time.process_time() < 2.5: pass'"
    needs = {"cpu": "2..", "memory": "500MB.."}
    name = server.submit(burn, backends=["cluster"], resources=needs, max_duration="10m")
    waits = "Slurm keeps it waiting: its reservation has not begun (Reservation)"
    eventually(lambda: server.run(name)["status_message"] == waits, deadline=90)
    slurm.command("scontrol", "update", "reservation=soon", "starttime=now")
    assert server.wait(name)["status"] == "done"
    used = eventually(lambda: server.run(name)["jobs"][0]["accounting"], deadline=120)
    # Slurm reads it once a second: the last moments of a job are in no reading.
    assert 1 <= used["cpu_used_s"] <= used["cpu_reserved_s"]
    assert used["cpu_reserved_s"] == 2 * used["elapsed_s"]
    assert 200 <= used["memory_peak_mib"] <= 500
    assert "CPU-s reserved, at most " in used["detail"]
