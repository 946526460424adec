"""An engine's arguments, and what its messages mean. No engine is needed."""

from __future__ import annotations

import itertools
import os
import pwd
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from dstackweb.runner import contained as containing
from dstackweb.runner.contained import Contained
from dstackweb.runner.container import Container, Mount, Start, VolumeRefused, arguments, exports, split_env, volume
from dstackweb.runner.engine import FAILED_FILE, Engine, EngineAway, error_of, find
from dstackweb.runner.images import ImageFault, fault_of, full_name, registry_of
from tests.support import eventually

USER = pwd.struct_passwd(("project-7", "x", 1900000007, 1900000007, "", "/nonexistent", "/bin/sh"))


def made(engine: str = "docker", **more: Any) -> list[str]:
    start = Start(**{
        "job": "1-2", "image": "sha256:ab", "argv": ("-c", "--privileged"), "entrypoint": "/bin/sh",
        "user": USER, "groups": [1900000007, 44], "working_dir": "/runs/1",
        "mounts": [Mount("/runs/1", "/runs/1", True)],
        "gpus": [], "memory_mib": 64, "cpus": 2, "processes": 16384,
    } | more)  # fmt: skip
    return arguments(Engine(engine, engine), start, "/proc/self/fd/9")


def test_a_container_has_no_rights_and_always_limits() -> None:
    words = made()
    pairs = set(itertools.pairwise(words))
    assert {
        ("--user", "1900000007:1900000007"), ("--cap-drop", "ALL"), ("--security-opt", "no-new-privileges"),
        ("--memory", "64m"), ("--memory-swap", "64m"), ("--cpus", "2"), ("--pids-limit", "16384"),
        ("--network", "host"), ("--label", "dstackweb.job=1-2"), ("--group-add", "44"),
    } <= pairs  # fmt: skip
    assert "--rm" not in words
    assert words[words.index("--") :] == ["--", "sha256:ab", "-c", "--privileged"]


def test_a_container_gets_the_claimed_gpus_alone() -> None:
    assert '"device=GPU-a,GPU-b"' in made(gpus=["GPU-a", "GPU-b"])
    podman = made("podman", gpus=["GPU-a", "GPU-b"])
    assert [podman[at + 1] for at, word in enumerate(podman) if word == "--device"] == [
        "nvidia.com/gpu=GPU-a", "nvidia.com/gpu=GPU-b",
    ]  # fmt: skip
    assert not {"--gpus", "--device"} & set(made())


def test_a_mount_is_one_line_of_csv_whatever_its_folders_are_called() -> None:
    assert (
        Mount('/a,readonly=false"', "/b").option() == '"type=bind","source=/a,readonly=false""","target=/b","readonly"'
    )


def test_a_value_that_no_line_can_hold_is_set_by_the_shell() -> None:
    lines, rest = split_env({"A": "1", "B": "two\nlines", "C": "x" * 70_000})
    assert (list(lines), list(rest)) == (["A"], ["B", "C"])
    assert exports({"B": "it's\ntwo"}) == "export B='it'\"'\"'s\ntwo'\n"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name in ("data/sets/one", "scratch", "secret"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "data/out").symlink_to(tmp_path / "secret")
    return tmp_path


def test_listed_folders_are_mounted_read_only_unless_they_are_listed_to_be_written(data: Path) -> None:
    listed = [f"{data}/data", f"{data}/scratch:rw"]
    assert volume(f"{data}/data/sets:/sets", listed) == Mount(f"{data}/data/sets", "/sets", False)
    assert volume(f"{data}/scratch:/s", listed) == Mount(f"{data}/scratch", "/s", True)
    assert volume(f"{data}/scratch:/s:ro", listed) == Mount(f"{data}/scratch", "/s", False)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("/etc:/x", "/etc is not listed for jobs on this host"),
        ("{}/data/out:/x", "is not listed"),
        ("{}/data/../secret:/x", "is not listed"),
        ("{}/database:/x", "is not listed"),
        ("{}/data:/x:rw", "may only be read on this host"),
        ("{}/data/sets/none:/x", "is not a folder on this host"),
    ],
)
def test_other_folders_are_refused_by_name(data: Path, asked: str, said: str) -> None:
    with pytest.raises(VolumeRefused, match=said):
        volume(asked.format(data), [f"{data}/data"])


def test_a_folder_that_a_job_could_replace_by_a_link_is_refused(data: Path) -> None:
    listed = [f"{data}/scratch:rw"]
    (data / "scratch/mine").mkdir()
    assert volume(f"{data}/scratch/mine:/x", listed)
    with pytest.raises(VolumeRefused, match="others may change"):
        volume(f"{data}/scratch/mine:/x", listed, {os.getuid()})
    (data / "scratch").chmod(0o777)
    with pytest.raises(VolumeRefused, match="others may change"):
        volume(f"{data}/scratch/mine:/x", listed)
    assert volume(f"{data}/scratch:/x", listed)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("Error response from daemon: manifest for h:1/a:2 not found: manifest unknown: manifest unknown", "not_found"),
        ('Error response from daemon: Head "https://h/v2/a/manifests/1": no basic auth credentials', "denied"),
        ("pull access denied for x, repository does not exist or may require 'docker login': denied", "denied"),
        ('Get "http://127.0.0.1:9/v2/": dial tcp 127.0.0.1:9: connect: connection refused', "unreachable"),
        ("dial tcp: lookup registry.example: no such host", "unreachable"),
        ("failed to register layer: write /x: no space left on device", "no_space"),
        ("something else", "failed"),
    ],
)
def test_the_messages_of_pulls_have_codes(text: str, fault: str) -> None:
    assert fault_of(text) is ImageFault(fault)


def test_credentials_belong_to_the_images_registry() -> None:
    images = ["python:3.12", "team/tool", "docker.io/team/tool", "localhost/x", "r.example/a/b:1", "127.0.0.1:5000/x"]
    hub = "https://index.docker.io/v1/"
    registries = [hub, hub, hub, "localhost", "r.example", "127.0.0.1:5000"]
    assert [registry_of("docker", image) for image in images] == registries


@pytest.mark.parametrize(
    ("image", "full"),
    [
        ("python", "docker.io/library/python:latest"),
        ("oci:tmp", "docker.io/library/oci:tmp"),
        ("team/tool:1", "docker.io/team/tool:1"),
        ("docker.io/python:3.12", "docker.io/library/python:3.12"),
        ("index.docker.io/library/python:3.12", "docker.io/library/python:3.12"),
        ("localhost/x", "localhost/x:latest"),
        ("r.example:5000/a/b", "r.example:5000/a/b:latest"),
        ("r.example/a:1@sha256:0f", "r.example/a@sha256:0f"),
    ],
)
def test_engines_are_asked_for_images_by_whole_names(image: str, full: str) -> None:
    assert full_name(image) == full


def test_an_engine_that_gives_no_answer_says_nothing_of_what_it_runs() -> None:
    away = error_of("docker", "Cannot connect to the Docker daemon at unix:///x. Is the docker daemon running?", 1)
    assert isinstance(away, EngineAway)
    assert not isinstance(error_of("docker", "Error: No such container: x", 1), EngineAway)


def test_a_machine_without_an_engine_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find()[1]["code"] == "not_found"
    assert find("none") == (None, {})
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\necho 'permission denied while trying to connect to the socket' >&2\nexit 1\n")
    docker.chmod(0o755)
    engine, report = find()
    assert (engine, report["name"], report["code"]) == (None, "docker", "not_permitted")


def test_the_engines_command_has_nothing_of_the_jobs_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/evil.so")
    assert set(Engine("docker", "docker", "unix:///s").environment()) == {
        "PATH",
        "LANG",
        "DOCKER_CONFIG",
        "DOCKER_HOST",
    }


def test_an_engine_that_is_away_is_not_asked_at_each_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containing, "AGAIN_S", 600.0)
    calls, program = tmp_path / "calls", tmp_path / "docker"
    program.write_text(f"#!/bin/sh\necho $1 >> {calls}\necho 'Cannot connect to the Docker daemon' >&2\nexit 1\n")
    program.chmod(0o755)
    with (tmp_path / "output").open("wb") as output:
        made = Container(Engine("docker", str(program), ""), str(uuid4()))
        contained = Contained(made, output.fileno(), 0, 65534, str(tmp_path))
        eventually(lambda: "start" in calls.read_text())
        attached = contained.spared()
        assert [contained.spared() for _ in range(20)] == [attached] * 20
    assert calls.read_text().split().count("inspect") == 1
    assert "Cannot connect" in (tmp_path / FAILED_FILE).read_text(), "the host is told, too"
