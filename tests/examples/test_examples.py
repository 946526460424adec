"""The shipped run files are valid, and do what their comments say when they really run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dstackweb.profiles.resolve import resolve
from dstackweb.runner.pyz import package, write_zip
from dstackweb.runner.task_lines import parse
from dstackweb.spec.effective import EffectiveSpec
from dstackweb.spec.run_file import parse_run_file, split
from tests.support import REPO
from tests.tracking.ear import Ear

EXAMPLES = REPO / "examples"
FILES = sorted(path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.yaml"))


def specs_of(name: str) -> list[EffectiveSpec]:
    """Of each run in the file."""
    return [resolve(parse_run_file(part.config), None).spec for part in split((EXAMPLES / name).read_text())]


def spec_of(name: str) -> EffectiveSpec:
    [spec] = specs_of(name)
    return spec


def start(spec: EffectiveSpec, folder: Path, **env: str) -> subprocess.Popen[str]:
    """The commands in one shell that stops at the first failure, with the variables that every job has."""
    given = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "LANG": "C.UTF-8",
        "DSTACK_RUN_NAME": spec.name or "run",
        "DSTACK_RUN_ID": "6f0f2ab4-2c9d-4a5e-9d6b-3f6d2f0b7c11",
        "DSTACK_RUN_DIR": str(folder),
        **spec.env,
    }
    return subprocess.Popen(
        [spec.shell, "-e", "-c", "\n".join(spec.commands)],
        cwd=folder,
        env=given | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(name: str, folder: Path, **env: str) -> tuple[int, str]:
    """The exit code and output of an example."""
    process = start(spec_of(name), folder, **env)
    output, _ = process.communicate(timeout=30)
    return process.returncode, output


def test_the_set_is_complete() -> None:
    assert FILES == [
        "cloud.yaml", "dask.yaml", "dev-environment.yaml", "fail.yaml", "gpu.yaml", "hello.yaml", "multi-node.yaml",
        "pipeline.yaml", "ray.yaml", "service.yaml", "slurm.yaml", "sweep.yaml", "tasks.yaml", "tracked.yaml",
        "train-cpu.yaml",
    ]  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_every_example_is_valid_and_has_a_description(name: str) -> None:
    text = (EXAMPLES / name).read_text()
    assert text.startswith("# ")
    assert len(text.splitlines()[0]) > 30
    for spec in specs_of(name):
        assert (spec.backends is None) == (
            name not in ("cloud.yaml", "ray.yaml", "slurm.yaml")
        )  # what costs money is named
        assert (spec.requirements.gpu_count_min > 0) == (name == "gpu.yaml")


def test_the_tasks_example_reports_each_training_until_its_end(tmp_path: Path) -> None:
    code, output = run("tasks.yaml", tmp_path, PAUSE="0")
    found = [parse(line.encode()) for line in output.splitlines()]
    assert code == 0
    assert Counter(event["state"] for event in found) == {"waiting": 12, "running": 12, "done": 11, "failed": 1}
    last = {event["key"]: event["state"] for event in found}
    assert Counter(last.values()) == {"done": 11, "failed": 1}


def test_hello_says_hello(tmp_path: Path) -> None:
    code, output = run("hello.yaml", tmp_path, PAUSE="0")
    assert code == 0
    assert output.startswith("Hello from hello on ")
    assert output.endswith("Done.\n")


def test_the_runs_of_the_pipeline_follow_each_other() -> None:
    specs = specs_of("pipeline.yaml")
    waits = [(spec.name, [(one.run, one.on) for one in spec.after]) for spec in specs]
    assert waits == [("prepare", []), ("train", [("prepare", "done")]), ("report", [("train", "ended")])]
    assert [spec.array.size if spec.array else 1 for spec in specs] == [1, 4, 1]


def test_fail_fails_with_3_and_stops_there(tmp_path: Path) -> None:
    code, output = run("fail.yaml", tmp_path)
    assert code == 3
    assert "data/train.csv is not there" in output
    assert "never see" not in output


def test_training_resumes_from_its_checkpoint_after_a_failure(tmp_path: Path) -> None:
    assert spec_of("train-cpu.yaml").retry is not None
    code, output = run("train-cpu.yaml", tmp_path, EPOCHS="4", FAIL_ONCE_AT="2")
    assert code == 1
    assert output.startswith("starting from the beginning\nepoch 1/4  loss ")
    assert "failing once, at epoch 2" in output
    code, output = run("train-cpu.yaml", tmp_path, EPOCHS="4", FAIL_ONCE_AT="2")
    assert code == 0
    assert output.startswith("resuming after epoch 2\n")
    assert output.endswith("finished\n")
    assert json.loads((tmp_path / "checkpoint.json").read_text())["epoch"] == 4


@pytest.mark.slow
def test_training_that_was_interrupted_ends_with_the_same_weights(tmp_path: Path) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    whole.mkdir()
    halves.mkdir()
    assert run("train-cpu.yaml", whole, EPOCHS="4")[0] == 0
    assert run("train-cpu.yaml", halves, EPOCHS="2")[0] == 0
    assert run("train-cpu.yaml", halves, EPOCHS="4")[0] == 0
    assert (whole / "checkpoint.json").read_text() == (halves / "checkpoint.json").read_text()


def test_two_nodes_exchange_a_message(tmp_path: Path) -> None:
    spec = spec_of("multi-node.yaml")
    assert spec.nodes == 2
    nodes = []
    for rank in ("1", "0"):
        folder = tmp_path / rank
        folder.mkdir()
        env = {"DSTACK_NODES_NUM": "2", "DSTACK_NODE_RANK": rank, "DSTACK_MASTER_NODE_IP": "127.0.0.1"}
        nodes.append(start(spec, folder, **env))
    second, first = (node.communicate(timeout=30)[0] for node in nodes)
    assert [node.returncode for node in nodes] == [0, 0]
    assert "I am node 0 of 2; node 0 has the address 127.0.0.1" in first
    assert "received: hello from node 1 (127.0.0.1)" in first
    assert "received: hello from node 0" in second


def test_the_search_reports_each_training_and_its_steps(tmp_path: Path) -> None:
    with Ear() as ear:
        code, output = run("tracked.yaml", tmp_path, SECONDS_PER_STEP="0", **ear.env)
    assert code == 0
    assert output.endswith("31 of 40 converged; the best loss is 0.00903\n")
    assert Counter(ear.states().values()) == {"memory": 31, "erred": 9}
    failed = [event["message"] for event in ear.events().values() if event["state"] == "erred"]
    assert all("diverges: loss" in message for message in failed)
    steps = ear.counts("step")
    assert sum(steps.values()) == 40 * 50
    assert set(steps) == {"memory", "released"}  # what is left of those that diverged
    assert ear.ended == ear.reporters


def test_the_search_works_without_dstackweb_installed_and_without_a_place_to_report(tmp_path: Path) -> None:
    """What is missing comes from the server in one file; nobody reports where nothing says where to."""
    write_zip(tmp_path / "tracking.zip", package("tracking"))
    served = partial(SimpleHTTPRequestHandler, directory=tmp_path)
    (tmp_path / "api" / "v1").mkdir(parents=True)
    (tmp_path / "tracking.zip").rename(tmp_path / "api" / "v1" / "tracking.zip")
    (tmp_path / "python3").write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    (tmp_path / "python3").chmod(0o755)
    with ThreadingHTTPServer(("127.0.0.1", 0), served) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        env = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "DSTACKWEB_TASKS_URL": f"http://127.0.0.1:{server.server_port}/api/v1/projects/main/runs/r/tasks",
        }
        code, output = run("tracked.yaml", tmp_path, SECONDS_PER_STEP="0", **env)
        server.shutdown()
    assert code == 0, output
    assert (tmp_path / "tracking.zip").exists()
    assert output.endswith("31 of 40 converged; the best loss is 0.00903\n")


@pytest.mark.slow
def test_the_dask_program_shows_its_groups(tmp_path: Path) -> None:
    with Ear() as ear:
        code, output = run("dask.yaml", tmp_path, FILES="20", SECONDS_PER_TASK="0", **ear.env)
    assert code == 0
    assert output.endswith("19 of 20 files scored, 1 failed\n")
    assert [sum(ear.counts(prefix).values()) for prefix in ("load", "clean", "score")] == [20, 20, 20]
    failures = [failure["message"] for body in ear.bodies for failure in body.get("failures", [])]
    assert len(failures) == 1
    assert failures[0].startswith("ValueError('file 7 has no labels')")
    assert ear.ended == ear.reporters


def test_one_run_of_the_sweep_learns(tmp_path: Path) -> None:
    array = spec_of("sweep.yaml").array
    assert array is not None
    assert (array.size, array.max_parallel) == (20, 4)
    code, output = run("sweep.yaml", tmp_path, **array.parameters(12) | {"SECONDS_PER_STEP": "0"})
    assert code == 0
    assert "learning rate 0.5: loss 0.0" in output
