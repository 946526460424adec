"""A cgroup per job on this machine, or what holds without one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from dstackweb.backends.models import CgroupCode
from dstackweb.runner import cgroups, tree
from dstackweb.runner.cgroups import text_of
from dstackweb.runner.child import oom_score
from dstackweb.runner.jobs import LocalJobs
from tests.runner.conftest import OTHER_USER, Box, runs
from tests.support import eventually

MakeBox = Callable[..., Box]
WORK = "while [ ! -e enough ]; do sleep 0.02; done"
NAMELESS = "(env -i setsid sh -c 'echo $$ > daemon; exec sleep 600' > /dev/null 2>&1 &)"
UNTIL_IT_RUNS = "while [ ! -s daemon ]; do sleep 0.01; done"
EAT = "python3 -S -c 'x = b\"x\" * (200 << 20); print(len(x))'"


@cache
def support() -> dict[str, Any]:
    return cgroups.support()


def test_a_daemon_that_escaped_a_killed_runner_is_ended_by_the_next(box: MakeBox) -> None:
    """It has no marker, and its parent is no longer the runner."""
    job = box(NAMELESS, UNTIL_IT_RUNS, "echo up", "sleep 600")
    job.launch()
    job.wait_for("up")
    daemon = int((job.run_dir / "daemon").read_text())
    job.kill()
    job.launch()
    assert job.end()["reason"] == "instance_unreachable"
    if support()["version"]:
        assert not runs(daemon)
    else:
        assert runs(daemon)
        os.kill(daemon, signal.SIGKILL)


def test_a_jobs_cgroup_is_removed_with_it(box: MakeBox) -> None:
    job = box("cat /proc/self/cgroup", "echo up", WORK)
    job.launch()
    job.wait_for("up")
    group = cgroups.read(str(job.state))
    assert bool(group.folders) == bool(support()["version"])
    assert all(f"/dstackweb-{job.api.job}" in job.api.log.decode() for _ in group.folders)
    assert job.pid not in group.processes()
    (job.run_dir / "enough").touch()
    job.end()
    assert not any(map(os.path.exists, group.folders))


@pytest.mark.parametrize("after", ["", " || true; sleep 600"], ids=["at once", "though its command goes on"])
def test_a_job_over_its_limit_is_killed_and_its_neighbour_survives(box: MakeBox, after: str) -> None:
    neighbour = box("echo up", WORK, memory_mib=64, memory_max_mib=64)
    neighbour.launch()
    job = box(EAT + (after if support()["memory"] else ""), memory_mib=64, memory_max_mib=64, host_memory_mib=8000)
    job.launch()
    end = job.end()
    if support()["memory"]:
        assert (end["reason"], end["memory_mib"]) == ("out_of_memory", 64)
        assert end["exit_code"] in (137, 143)
    else:
        assert (end["reason"], job.lines()) == ("done_by_runner", [str(200 << 20)])
    neighbour.wait_for("up")
    (neighbour.run_dir / "enough").touch()
    assert neighbour.end()["reason"] == "done_by_runner"


def test_an_earlier_stop_stays_the_reason(box: MakeBox) -> None:
    job = box(f"trap 'eval \"$EAT\"' TERM; echo up; {WORK}", env={"EAT": EAT}, memory_max_mib=64)
    job.launch()
    job.wait_for("up")
    job.api.action = {"action": "stop", "reason": "terminated_by_user", "grace_s": 5}
    assert job.end()["reason"] == "terminated_by_user"


def test_a_job_gets_the_cpus_that_it_may_use_at_most(box: MakeBox) -> None:
    job = box("echo up", WORK, cpus=1, cpu_max=1)
    job.launch()
    job.wait_for("up")
    group = cgroups.read(str(job.state))
    assert group.cpus == (1 if support()["cpu"] else None)
    quotas = [text_of(folder, "cpu.max") or text_of(folder, "cpu.cfs_quota_us") for folder in group.folders]
    assert any(quota.startswith("100000") for quota in quotas) == support()["cpu"]


def test_without_upper_ends_nothing_is_limited(box: MakeBox) -> None:
    job = box(EAT, cpus=1, cpu_max=None, memory_mib=64, memory_max_mib=None, host_memory_mib=8000)
    job.launch()
    assert job.end()["reason"] == "done_by_runner"


def test_a_job_above_its_memory_request_is_killed_first(box: MakeBox) -> None:
    job = box("cat /proc/self/oom_score_adj", memory_mib=2000, host_memory_mib=8000)
    job.launch()
    job.end()
    assert job.lines() == ["750"]
    assert oom_score({"memory_mib": 8000, "host_memory_mib": 8000}) == 2
    assert oom_score({"memory_mib": 1, "host_memory_mib": 8000}) == 999
    assert oom_score({}) is None


FORKS = """
import os, signal, time
for made in range(300):
    try:
        if os.fork() == 0:
            time.sleep(600)
    except BlockingIOError:
        break
print(made)
"""


def test_the_cgroup_that_a_killed_runner_left_goes_with_the_jobs_files(box: MakeBox) -> None:
    job = box("true")
    job.api.trouble = lambda what: 503 if what == "exit" else None
    job.launch()
    eventually(lambda: (job.state / "exit").exists())
    group = cgroups.read(str(job.state))
    job.kill()
    assert bool(group.folders) == bool(support()["version"])
    assert all(map(os.path.isdir, group.folders))
    assert LocalJobs(str(job.state.parents[1])).forget([job.api.job]) == 1
    assert not any(map(os.path.exists, group.folders))


@pytest.mark.needs("root")
def test_a_job_that_forks_without_end_has_no_more_processes_than_its_limit(box: MakeBox) -> None:
    job = box(f"python3 -S -c '{FORKS}'", process_limit=100)
    job.launch()
    assert job.end()["exit_code"] == 0
    [made] = map(int, job.lines())
    limited = support()["version"] and any("pids" in one.controllers for one in cgroups.hierarchies())
    assert 80 < made < 100 if limited else made == 299


def test_jobs_with_a_user_of_their_own_are_limited_by_user_too_and_others_not(box: MakeBox) -> None:
    job = box("grep 'Max processes' /proc/self/limits", process_limit=64)
    job.launch()
    job.end()
    own = Path("/proc/self/limits").read_text()
    assert (job.lines()[0] in own) == (OTHER_USER is None)
    if OTHER_USER:
        assert job.lines()[0].split()[2:4] == ["512", "512"]


def test_a_frozen_forking_crowd_is_killed_to_the_last(box: MakeBox) -> None:
    crowd = "(env -i setsid sh -c 'while :; do (sleep 0.01; exit) & (setsid sleep 30 &); sleep 0.01; done' &)"
    job = box(f"{crowd} > /dev/null 2>&1", "echo up", WORK)
    job.launch()
    job.wait_for("up")
    group = cgroups.read(str(job.state))
    (job.run_dir / "enough").touch()
    assert job.end()["reason"] == "done_by_runner"
    assert not group.processes()


def test_the_cgroup_check_leaves_nothing_behind_and_reports_why() -> None:
    found, pid = _support_of(None)
    assert found == support()
    assert (found["code"] == "") == (found["memory"] and found["cpu"])
    assert found["code"] in ("", *CgroupCode)
    left = [Path(one.parent(), f"{cgroups.PREFIX}check-{pid}") for one in cgroups.hierarchies()]
    assert not any(folder.exists() for folder in left)
    if OTHER_USER:
        assert _support_of(OTHER_USER)[0]["code"] in ("not_permitted", "not_mounted", "read_only")


def _support_of(user: str | None) -> tuple[dict[str, Any], int]:
    """What a process of this user says is allowed, and its pid."""
    command = [
        shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin") or sys.executable,
        "-S",
        "-c",
        Path(cgroups.__file__).read_text(),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd="/", user=user) as process:
        answer: dict[str, Any] = json.loads(process.communicate()[0])
    assert process.returncode == 0
    return answer, process.pid


@pytest.fixture
def group() -> Iterator[cgroups.Group]:
    """A group of this test's own, without folders where the machine allows none."""
    try:
        made = cgroups.make(f"test-{uuid4()}")
    except cgroups.CannotMake:
        made = cgroups.Group()
    yield made
    made.kill()
    eventually(lambda: not made.processes())
    made.remove()


def test_a_kill_ends_frozen_processes_and_ignores_zombies(group: cgroups.Group) -> None:
    process = subprocess.Popen(["sleep", "600"], preexec_fn=group.enter)
    assert group.processes() == ({process.pid} if group.folders else set())
    for folder in group.folders:
        cgroups._freeze(folder, True)
    group.kill()
    tree.kill({process.pid}, group)
    eventually(lambda: not group.processes())
    assert process.wait() == -signal.SIGKILL


@pytest.fixture
def marked() -> Iterator[Callable[..., int]]:
    """Starts processes with the marker of a job."""
    started: list[subprocess.Popen[bytes]] = []

    def start(job: str, **how: Any) -> int:
        started.append(subprocess.Popen(["/bin/sleep", "600"], **({"env": {tree.MARKER: job}} | how)))
        return started[-1].pid

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_another_jobs_marker_makes_no_process_part_of_that_job(
    group: cgroups.Group, marked: Callable[..., int]
) -> None:
    job = str(uuid4())
    own, in_anothers_group = marked(job), marked(job, preexec_fn=group.enter)
    assert tree.processes(job, cgroups.NO_GROUP, set()) == ({own} if group.folders else {own, in_anothers_group})


@pytest.mark.needs("root")
def test_without_cgroups_a_marker_counts_for_processes_of_the_jobs_user(marked: Callable[..., int]) -> None:
    job, jobs_user = str(uuid4()), 1900000007
    own, sandbox, _other = marked(job, user=jobs_user), marked(job), marked(job, user=1900000008)
    assert tree.processes(job, cgroups.NO_GROUP, set(), jobs_user) == {own, sandbox}


@pytest.mark.slow
def test_other_jobs_cannot_make_the_search_for_processes_read_much(
    group: cgroups.Group, marked: Callable[..., int]
) -> None:
    """Thousands of large environments took minutes to read, each time any job of the machine ended or was stopped."""
    large = {f"LARGE_{number}": "x" * 120_000 for number in range(12)}
    many = range(10)
    if group.folders:
        found = [marked("", env=large, preexec_fn=group.enter) for _ in many]
        assert {tree.job_of(pid) for pid in found} == {group.folders[0].rpartition(cgroups.PREFIX)[2]}
    if OTHER_USER:
        for _ in many:
            marked("", env=large, user=1900000008)
    before = _bytes_read()
    tree.processes(str(uuid4()), cgroups.NO_GROUP, set(), 1900000007)
    assert _bytes_read() - before < 12_000_000


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def machine(tmp_path: Path, groups: str, mounts: dict[str, str]) -> str:
    """A /proc with these lines; `mounts` are folders with the rest of their lines."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text(groups)
    lines = [f"30 20 0:{n} {line.replace('TOP', top)}\n" for n, (top, line) in enumerate(mounts.items())]
    (tmp_path / "self/mountinfo").write_text("".join(lines))
    return str(tmp_path)


def test_cgroup_v1_and_v2_mounted_together_are_distinguished(tmp_path: Path) -> None:
    tops = {name: tmp_path / name for name in ("memory", "cpu", "unified")}
    for top in tops.values():
        top.mkdir()
    (tops["memory"] / "jobs").mkdir()
    (tops["unified"] / "cgroup.controllers").write_text("hugetlb\n")
    found = cgroups.hierarchies(
        machine(
            tmp_path,
            "4:memory:/jobs\n1:cpu,cpuacct:/\n0::/\n",
            {
                str(tops["memory"]): "/ TOP rw - cgroup cgroup rw,memory",
                str(tops["cpu"]): "/ TOP rw,nosuid shared:9 - cgroup cgroup rw,cpu,cpuacct",
                str(tops["unified"]): "/ TOP rw - cgroup2 cgroup2 rw",
                "/elsewhere": "/ TOP rw - tmpfs tmpfs rw",
            },
        )
    )
    assert [(one.version, one.own, sorted(one.controllers)) for one in found] == [
        (1, str(tops["memory"] / "jobs"), ["memory"]),
        (1, str(tops["cpu"]), ["cpu", "cpuacct"]),
        (2, str(tops["unified"]), ["hugetlb"]),
    ]
    assert found[2].parent() == str(tops["unified"])


def test_a_container_that_shows_only_its_own_groups(tmp_path: Path) -> None:
    top = tmp_path / "cgroup"
    top.mkdir()
    (top / "cgroup.controllers").write_text("cpu memory\n")
    for groups, root in (("0::/docker/abc\n", "/docker/abc"), ("0::/docker/abc\n", "/"), ("0::/../..\n", "/")):
        place = tmp_path / f"proc{time.monotonic_ns()}"
        place.mkdir()
        found = cgroups.hierarchies(machine(place, groups, {str(top): f"{root} TOP rw - cgroup2 cgroup rw"}))
        assert [(one.version, one.own) for one in found] == [(2, str(top))]


def test_in_cgroup_v2_jobs_are_placed_as_deep_as_controllers_are_enabled(tmp_path: Path) -> None:
    """A service's own group has processes and may give no controllers; the slice above it gives them."""
    service = tmp_path / "system.slice/server.service"
    service.mkdir(parents=True)
    for folder, gives in ((tmp_path, "cpu memory"), (tmp_path / "system.slice", "cpu memory pids"), (service, None)):
        (folder / "cgroup.controllers").write_text("cpu memory\n")
        if gives is not None:
            (folder / "cgroup.subtree_control").write_text(gives)
    here = cgroups.Hierarchy(2, str(tmp_path), str(service), frozenset({"cpu", "memory", "io"}))
    assert here.parent() == str(tmp_path / "system.slice")
    assert cgroups.Hierarchy(2, str(tmp_path), str(service), frozenset({"io"})).parent() == str(service)


def test_a_machine_without_cgroups_is_reported_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cgroups.hierarchies(str(tmp_path)) == []
    monkeypatch.setattr(cgroups, "hierarchies", lambda: [])
    assert cgroups.support()["code"] == "not_mounted"
    assert cgroups.read(str(tmp_path)) == cgroups.Group()
