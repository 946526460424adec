"""Jobs in containers of a real Docker daemon, and of Podman."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dstackweb.runner import container, images, tree
from dstackweb.runner.engine import Engine, Finder
from tests import containers
from tests.containers import IMAGE, PASSWORD, USER, Docker
from tests.runner.conftest import Box
from tests.server import Server
from tests.servers import free_port
from tests.support import eventually

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.xdist_group("containers"),
    pytest.mark.needs("root", "docker"),
]
UIDS = "1900000000-1900999999"
UID = 1900000007


@pytest.fixture
def contained(docker: Docker, box: Callable[..., Box]) -> Iterator[Callable[..., Box]]:
    """Makes jobs in containers; none of them is left behind."""

    def make(*commands: str, volumes: tuple[str, ...] = (), engine: Engine | None = None, **spec: Any) -> Box:
        defaults = {
            "image": IMAGE, "pull_policy": "missing", "registry_auth": None, "entrypoint": None, "project": 7,
            "memory_max_mib": 64, "cpu_max": 1,
        }  # fmt: skip
        job = box(*commands, **{**defaults, **spec})
        job.orders |= {"user": UIDS, "engine": (engine or docker.engine).stored() | {"volumes": list(volumes)}}
        return job

    yield make
    docker.ensure()
    assert docker.left() == []


def ended(job: Box) -> dict[str, Any]:
    job.launch()
    return job.end()


def test_commands_run_in_the_image_as_the_projects_user_in_the_runs_directory(contained: Callable[..., Box]) -> None:
    job = contained(
        "echo $FROM_IMAGE $LR $DSTACK_RUN_NAME", "id -u", "pwd > here", "echo $NVIDIA_VISIBLE_DEVICES",
        "grep -E 'CapEff|CapBnd|NoNewPrivs' /proc/self/status",
        "ls /proc | grep -c '^[0-9]' | grep -v '^.$' || echo alone",
        env={"LR": "1e-4"},
    )  # fmt: skip
    assert ended(job)["reason"] == "done_by_runner", job.lines()
    lines = job.lines()
    assert lines[0].startswith(f"[dstackweb: image {IMAGE}: sha256:")
    assert lines[1:4] == ["yes 1e-4 night", str(UID), "void"]
    assert {"CapEff:\t0000000000000000", "CapBnd:\t0000000000000000", "NoNewPrivs:\t1", "alone"} <= set(lines)
    assert (job.run_dir / "here").read_text().strip() == str(job.run_dir)
    assert (job.run_dir / "here").stat().st_uid == UID
    started = next(call.said for call in job.api.calls if call.what == "started")
    assert started["image_digest"].startswith("sha256:")
    assert container.read(str(job.state)) is None


def test_an_image_is_not_found_by_its_id(contained: Callable[..., Box], docker: Docker) -> None:
    """Beginnings of ids can be tried out: the images of all projects would be there for each."""
    known = images.find(docker.engine, IMAGE)
    assert known is not None
    for name in (known.id, known.id[:15], known.id.removeprefix("sha256:"), known.id[7:8], known.id[7:20]):
        job = contained("true", image=name, pull_policy="never")
        assert ended(job)["image_pull_failed"] == {"fault": "not_present", "image": name}


@pytest.mark.parametrize(
    ("commands", "entrypoint", "printed"),
    [
        ([], None, ["own program"]),
        ([], "/bin/echo 'a b' c", ["a b c"]),
        (["d e", "f"], "/bin/echo x", ["x d e f"]),
    ],
)
def test_the_entrypoint_gets_the_commands_as_arguments_and_the_images_own_program_runs_without_any(
    contained: Callable[..., Box], commands: list[str], entrypoint: str | None, printed: list[str]
) -> None:
    job = contained(*commands, entrypoint=entrypoint)
    assert ended(job)["exit_code"] == 0, job.lines()
    assert job.lines()[1:] == printed


def test_no_value_of_the_environment_is_in_an_argument(contained: Callable[..., Box]) -> None:
    """Values of several lines too, which Docker's file of variables can't have."""
    job = contained(
        'echo "$KEY"', "echo $TOKEN; echo go > up; while [ ! -e on ]; do sleep 0.1; done",
        env={"KEY": "line one\nline 'two'", "TOKEN": "the-secret-token", "LD_PRELOAD": "/evil.so"},
        redact=["the-secret-token", "line 'two'"],
    )  # fmt: skip
    job.launch()
    eventually(lambda: (job.run_dir / "up").exists(), every=0.02)
    arguments = b"".join(_arguments())
    assert b"line one" not in arguments
    assert b"the-secret-token" not in arguments
    (job.run_dir / "on").touch()
    assert job.end()["exit_code"] == 0
    assert job.lines()[1:] == ["line one", "*" * 10, "*" * 16]
    assert not (job.state / container.SCRIPT_FILE).exists()


def _arguments() -> Iterator[bytes]:
    return map(_arguments_of, tree.pids())


def _arguments_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_an_end_is_the_containers_own(contained: Callable[..., Box]) -> None:
    failed = contained("echo out", "echo err >&2", "exit 7")
    assert (ended(failed)["reason"], ended_code(failed)) == ("container_exited_with_error", 7)
    assert failed.lines()[1:] == ["out", "err"]
    odd = contained("true", shell="/bin/no-such-shell")
    assert ended(odd)["exit_code"] == 127
    assert "no-such-shell" in odd.lines()[-1]


def ended_code(job: Box) -> int | None:
    assert job.api.exit is not None
    code: int | None = job.api.exit["exit_code"]
    return code


def test_a_job_over_its_memory_ends_with_out_of_memory(contained: Callable[..., Box]) -> None:
    job = contained("x=$(head -c 200000000 /dev/zero | tail -c 190000000)", memory_max_mib=32)
    end = ended(job)
    assert (end["reason"], end["memory_mib"]) == ("out_of_memory", 32)


def test_what_a_container_changes_of_its_image_counts_as_its_files(contained: Callable[..., Box]) -> None:
    job = contained("head -c 30000000 /dev/zero > /tmp/large; while :; do sleep 0.1; done", disk_limit=10 << 20)
    assert ended(job)["reason"] == "out_of_disk"


@pytest.mark.parametrize("name", ["docker", "podman"])
def test_the_volumes_that_an_image_makes_count_as_the_jobs_files(
    contained: Callable[..., Box], docker: Docker, request: pytest.FixtureRequest, name: str
) -> None:
    engine: Engine = docker.engine if name == "docker" else request.getfixturevalue("podman")
    registry = "" if name == "docker" else "localhost/"
    base = engine.call("create", f"{registry}{IMAGE}").strip()
    engine.call("commit", "--change", "VOLUME /tmp", base, f"{registry}busybox-with-a-volume:1")
    engine.call("rm", base)
    large = "head -c 30000000 /dev/zero > /tmp/large; while :; do sleep 0.1; done"
    image = f"{registry}busybox-with-a-volume:1"
    assert ended(contained(large, image=image, engine=engine, disk_limit=10 << 20))["reason"] == "out_of_disk"
    assert engine.call("volume", "ls", "--quiet") == ""


def test_a_stop_gives_the_commands_their_grace_and_then_kills_all(contained: Callable[..., Box]) -> None:
    job = contained("trap 'echo bye; exit 3' TERM", "echo ready", "while :; do sleep 0.1 || true; done")
    job.launch()
    job.wait_for("ready")
    job.api.action = {"action": "stop", "grace_s": 30, "reason": "terminated_by_user"}
    end = job.end(nudged=True)
    assert (end["reason"], end["exit_code"], job.lines()[-1]) == ("terminated_by_user", 3, "bye")
    deaf = contained("trap '' TERM", "echo ready", "(setsid sh -c 'env -i sleep 300' &)", "while :; do sleep 0.1; done")
    deaf.launch()
    deaf.wait_for("ready")
    deaf.api.action = {"action": "stop", "grace_s": 0.2, "reason": "terminated_by_user"}
    end = deaf.end(nudged=True)
    assert (end["reason"], end["exit_code"]) == ("terminated_by_user", 137)


def test_the_runner_is_killed_and_the_next_one_ends_the_container_and_reports_it_once(
    contained: Callable[..., Box], docker: Docker
) -> None:
    job = contained("echo ran >> times", "echo ready", "env -i sleep 300")
    job.launch()
    job.wait_for("ready")
    job.kill()
    assert not container.is_gone(str(job.state))
    job.launch()
    assert job.end()["reason"] == "instance_unreachable"
    assert docker.left() == []
    assert (job.run_dir / "times").read_text() == "ran\n"
    assert len(job.api.exits) == 1


def test_the_host_ends_a_container_whose_runner_is_gone(contained: Callable[..., Box], docker: Docker) -> None:
    from dstackweb.runner.jobs import LocalJobs

    job = contained("echo ready", "env -i sleep 300")
    job.launch()
    job.wait_for("ready")
    jobs = LocalJobs(str(job.state.parents[1]))
    job.kill()
    tree.send(job.processes(), signal.SIGKILL)
    eventually(lambda: not job.processes(), every=0.02)
    assert jobs.kill(job.api.job)
    assert not jobs.has_orphans(job.api.job)
    assert docker.left() == []


def test_the_daemon_is_killed_and_the_job_goes_on_until_the_daemon_is_back(
    contained: Callable[..., Box], docker: Docker
) -> None:
    job = contained("echo ran >> times", "echo ready", "while :; do sleep 0.1; done")
    job.launch()
    job.wait_for("ready")
    docker.kill()
    assert not container.is_gone(str(job.state))
    beats = job.api.count("heartbeat")
    eventually(lambda: job.api.count("heartbeat") > beats + 3, every=0.02)
    assert job.api.exit is None
    docker.start()
    end = job.end(nudged=True)
    assert end["reason"] == "instance_unreachable"
    assert (job.run_dir / "times").read_text() == "ran\n"
    assert len(job.api.exits) == 1


def test_a_run_returns_from_a_host_whose_daemon_was_killed_and_the_host_has_none_until_it_is_back(
    contained: Callable[..., Box], docker: Docker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", docker.socket)
    running = contained("echo ready", "while :; do sleep 0.1; done")
    finder = Finder(str(running.state.parents[1]), "docker")
    assert finder.usable() is not None
    running.launch()
    running.wait_for("ready")
    docker.kill()
    eventually(lambda: finder.usable() is None, every=0.05)  # the runner of the container has noticed
    assert finder.current()[1]["code"] == "failed"
    end = ended(contained("echo never"))
    assert (end["reason"], end["by_engine"]) == ("not_claimed", True), end
    docker.start()
    assert running.end(nudged=True)["reason"] == "instance_unreachable"
    finder = Finder(str(running.state.parents[1]), "docker")
    assert finder.current()[1]["code"] == ""
    assert finder.usable() is not None
    assert docker.engine.call("images", "-q", "--filter", "dangling=true") == "", "a try leaves no image"


def test_podman_that_makes_no_container_is_the_hosts_fault_until_it_makes_one(
    contained: Callable[..., Box], podman: Engine, tmp_path: Path
) -> None:
    """It lists what there is, and has no place for anything new."""
    broken = tmp_path / "podman"
    broken.write_text(
        f'#!/bin/sh\n[ -e {tmp_path}/whole ] || case $1 in import | create) echo "no space left" >&2; exit 125;; esac\n'
        f'exec {podman.program} "$@"\n'
    )
    broken.chmod(0o755)
    engine = Engine("podman", str(broken))
    contained = partial(contained, image=f"localhost/{IMAGE}", engine=engine, pull_policy="never")
    end = ended(contained("echo never"))
    assert (end["reason"], end["by_engine"], end["message"]) == ("not_claimed", True, "no space left"), end
    (tmp_path / "whole").touch()
    engine.try_out()
    assert podman.call("ps", "-aq") == ""
    assert podman.call("images", "-q", "--filter", "dangling=true") == ""
    assert ended(contained("true"))["reason"] == "done_by_runner"


def test_a_daemon_that_keeps_its_containers_is_attached_to_again(contained: Callable[..., Box], docker: Docker) -> None:
    job = contained("echo ready", "while [ ! -e on ]; do echo so far; sleep 0.1; done", "echo after", "exit 4")
    job.launch()
    job.wait_for("ready")
    docker.kill()
    eventually(lambda: "gives no answer" in job.said(), every=0.05)
    docker.start("--live-restore")
    eventually(lambda: "attached to the container again" in job.said(), every=0.05)
    before = len(job.lines())
    eventually(lambda: len(job.lines()) > before, every=0.05)  # it is attached, and not only about to be
    (job.run_dir / "on").touch()
    assert (job.end()["exit_code"], job.lines()[-1]) == (4, "after")


def test_a_stop_works_without_the_daemon_and_is_reported_when_it_is_back(
    contained: Callable[..., Box], docker: Docker
) -> None:
    job = contained("echo ready", "while :; do sleep 0.1; done")
    job.launch()
    job.wait_for("ready")
    docker.kill()
    (first,) = {pid for pid in job.processes() if b"docker-init" in _arguments_of(pid)}
    job.api.action = {"action": "stop", "grace_s": 0.2, "reason": "terminated_by_user"}
    eventually(lambda: job.nudge() and first not in tree.pids(), every=0.05)
    assert job.api.exit is None
    docker.start()
    assert job.end(nudged=True)["reason"] == "terminated_by_user"


@pytest.mark.parametrize("name", ["docker", "podman"])
def test_an_image_is_pulled_with_the_runs_credentials_which_are_gone_afterwards(
    contained: Callable[..., Box], docker: Docker, request: pytest.FixtureRequest, name: str
) -> None:
    contained = partial(contained, engine=docker.engine if name == "docker" else request.getfixturevalue("podman"))
    with containers.registry(docker.home) as address:
        image = f"{address}/team/tool:1"
        docker.push(image)
        refused = contained("true", image=image)
        end = ended(refused)
        assert (end["reason"], end["image_pull_failed"]["fault"]) == ("image_pull_failed", "denied"), end
        wrong = contained("true", image=image, registry_auth={"username": USER, "password": "wrong"})
        assert ended(wrong)["image_pull_failed"]["fault"] == "denied"
        auth = {"username": USER, "password": PASSWORD}
        other = contained("true", image=f"{address}/team/other:1", registry_auth=auth)
        end = ended(other)
        assert end["image_pull_failed"] == {"fault": "not_found", "image": f"{address}/team/other:1"}, end
        job = contained("echo it runs", image=image, registry_auth=auth)
        assert ended(job)["reason"] == "done_by_runner", (job.api.exit, job.lines())
        assert job.lines()[-2].startswith(f"[dstackweb: image {image}: {address}/team/tool@sha256:")
        assert job.lines()[0] == f"[dstackweb: pulling {image}]"
        assert not (job.state / "registry").exists()
        assert job.api.count("heartbeat")
        again = contained("echo it runs again", image=image, registry_auth=auth)
        assert ended(again)["reason"] == "done_by_runner"
        assert "pulling" not in again.lines()[0]
        strange = contained("echo it runs", image=image, project=8)
        assert ended(strange)["image_pull_failed"]["fault"] == "denied", "another project has no password"
        never = contained("true", image=image, project=8, pull_policy="never")
        assert ended(never)["image_pull_failed"]["fault"] == "not_present"
        own = contained("echo it runs", image=image, project=8, registry_auth=auth)
        assert ended(own)["reason"] == "done_by_runner"
        assert ended(contained("true", image=image, project=8))["reason"] == "done_by_runner"
    never = contained("true", image="nowhere:1", pull_policy="never")
    assert ended(never)["image_pull_failed"]["fault"] == "not_present"
    away = contained("true", image=f"127.0.0.1:{free_port()}/x:1")
    assert ended(away)["image_pull_failed"]["fault"] == "unreachable"


def test_a_pull_that_hangs_is_begun_again_by_the_next_runner_and_ended_by_a_stop(contained: Callable[..., Box]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        image = f"127.0.0.1:{server.getsockname()[1]}/slow:1"
        job = contained("true", image=image, registry_auth={"username": USER, "password": PASSWORD})
        for runner in (1, 2):
            beats = job.api.count("heartbeat")
            job.launch()
            eventually(lambda beats=beats: job.api.count("heartbeat") > beats + 2, every=0.02)
            if runner == 1:
                job.kill()
                assert (job.state / "registry").exists()
        assert job.api.count("started") == 0
        job.api.action = {"action": "stop", "grace_s": 30, "reason": "terminated_by_user"}
        assert job.end(nudged=True)["reason"] == "terminated_by_user"
        assert not (job.state / "registry").exists()
        assert job.lines() == [f"[dstackweb: pulling {image}]"] * 2


def test_a_hostile_job_is_not_root_and_reaches_no_other_run_and_no_folder_that_is_not_listed(
    contained: Callable[..., Box], tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    for name in ("data", "scratch"):
        (tmp_path / name).mkdir(mode=0o777)
        (tmp_path / name).chmod(0o777)
    listed = (f"{tmp_path}/data", f"{tmp_path}/scratch:rw")
    other = contained("echo private > mine")
    ended(other)
    job = contained(
        "/setuid/busybox su -c 'id -u' 2>&1 || echo no root", "mount -t tmpfs x /tmp 2>/dev/null || echo no mount",
        f"cat {other.run_dir}/mine 2>/dev/null || echo no other",
        "ls /var/run/docker.sock 2>/dev/null || echo no socket",
        "touch /data/x 2>/dev/null || echo read-only", "touch /scratch/x && echo written",
        volumes=listed,
    )  # fmt: skip
    job.api.spec["volumes"] = [f"{tmp_path}/data:/data", f"{tmp_path}/scratch:/scratch"]
    assert ended(job)["exit_code"] == 0, job.lines()
    assert job.lines()[1:] == [
        "su: must be suid to work properly", "no root", "no mount", "no other", "no socket", "read-only",
        "written",
    ]  # fmt: skip
    (tmp_path / "scratch/link").symlink_to("/etc")
    for asked in ("/etc:/x", f"{tmp_path}/scratch/link:/x", f"{tmp_path}/data/../../..:/x", f"{tmp_path}/data:/x:rw"):
        refused = contained("true", volumes=listed)
        refused.api.spec["volumes"] = [asked]
        end = ended(refused)
        assert end["reason"] == "executor_error"
        assert end["message"].startswith("volumes: "), end


def test_no_image_takes_the_name_of_another_one_with_podman(
    contained: Callable[..., Box], podman: Engine, tmp_path: Path
) -> None:
    """An archive names its images itself, and Podman finds `tool:1` in any registry."""
    contained = partial(contained, engine=podman)
    names = ["docker.io/library/planted:1", "evil.example/x/tool:1", "evil.example/docker.io/library/tool:1"]
    for name in names:
        podman.call("tag", f"localhost/{IMAGE}", name)
    podman.call("save", "--output", f"{tmp_path}/planted.tar", names[0])
    podman.call("untag", f"localhost/{IMAGE}", names[0])
    assert ended(contained("true", image=f"docker-archive:{tmp_path}/planted.tar", pull_policy="always"))
    assert images.find(podman, names[0]) is None
    image = images.find(podman, names[1])
    assert image is not None
    for name in ("tool:1", "x/tool:1", "docker.io/library/tool:1", f"containers-storage:{image.id[7:20]}"):
        job = contained("true", image=name, pull_policy="never")
        assert ended(job)["reason"] in ("image_pull_failed", "creating_container_error"), name
    for name in names[1:]:
        podman.call("untag", f"localhost/{IMAGE}", name)


def test_podman_runs_stops_and_ends_what_its_killed_runner_left(contained: Callable[..., Box], podman: Engine) -> None:
    contained = partial(
        contained, image=f"localhost/{IMAGE}", engine=podman, pull_policy="never", process_limit=200, env={"LR": "1e-4"}
    )
    job = contained("echo $FROM_IMAGE $LR", "id -u", "echo x > here", "exit 3")
    assert ended(job)["exit_code"] == 3, job.lines()
    assert job.lines()[1:] == ["yes 1e-4", str(UID)]
    assert (job.run_dir / "here").stat().st_uid == UID
    stopped = contained("trap 'echo bye; exit 5' TERM", "echo ready", "while :; do sleep 0.1 || true; done")
    stopped.launch()
    stopped.wait_for("ready")
    stopped.api.action = {"action": "stop", "grace_s": 30, "reason": "terminated_by_user"}
    end = stopped.end(nudged=True)
    assert (end["reason"], end["exit_code"], stopped.lines()[-1]) == ("terminated_by_user", 5, "bye")
    killed = contained("trap '' TERM", "echo ready", "env -i sleep 300")
    killed.launch()
    killed.wait_for("ready")
    killed.kill()
    assert not container.is_gone(str(killed.state))
    killed.launch()
    assert killed.end()["reason"] == "instance_unreachable"
    assert podman.call("ps", "-aq", "--filter", "label=dstackweb.job").split() == []


def test_a_run_with_an_image_runs_on_a_host_with_docker_and_shows_what_it_ran_in(
    docker: Docker, open_home: Path
) -> None:
    with Server(open_home, DOCKER_HOST=docker.socket, DSTACKWEB_ENGINE="docker") as server:
        (host,) = server.http.get("/hosts").json()["items"]
        assert (host["engine"]["name"], host["engine"]["code"]) == ("docker", "")
        run = server.wait(server.submit("echo $FROM_IMAGE; ls /setuid", image=IMAGE), deadline=60)
        assert run["status"] == "done", run
        assert run["jobs"][0]["image_digest"].startswith("sha256:")
        assert server.log(run["name"]).endswith(b"yes\nbusybox\n")
        lost = server.wait(server.submit("true", image="127.0.0.1:9/nothing:1"), deadline=60)
        assert (lost["status"], lost["jobs"][0]["termination_reason"]) == ("failed", "image_pull_failed")
        assert "Its host can't reach the registry of the image 127.0.0.1:9/nothing:1." in lost["status_message"]
        docker.kill()
        waiting = [server.submit("true", image=IMAGE) for _ in range(6)]
        eventually(lambda: server.http.get("/hosts").json()["items"][0]["engine"]["code"], every=0.2)
        eventually(lambda: {server.run(name)["status"] for name in waiting} <= {"submitted", "pending"}, every=0.2)
        docker.start()
        assert {server.wait(name, deadline=120)["status"] for name in waiting} == {"done"}
    assert docker.left() == []
