"""What a job leaves in its artifacts directory reaches the API, whatever it is called and whatever it is."""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from dstackweb.runner import artifacts
from dstackweb.runner.artifacts import CHUNK, LeftOut, find, make_folder
from dstackweb.runner.limits import ARTIFACT_PATH_MAX as PATH_MAX, LISTED, is_safe
from tests.runner.conftest import Box
from tests.support import eventually, examples

MakeBox = Callable[..., Box]
LIMITS = {"file": 4 * CHUNK, "files": 100, "seconds": 60}
ME = pwd.getpwuid(os.getuid())


def keeping(box: MakeBox, *commands: str, **spec: Any) -> Box:
    return box(*commands, artifacts={**LIMITS, **spec.pop("limits", {})}, **spec)


def left(job: Box) -> dict[str, str]:
    """The files that were left out, and why."""
    assert job.api.exit is not None
    return {one["path"]: one["why"] for one in job.api.exit.get("artifacts", {"left_out": []})["left_out"]}


def test_files_are_sent_after_the_commands_and_before_the_end(box: MakeBox) -> None:
    job = keeping(
        box,
        'cd "$DSTACKWEB_ARTIFACTS"; mkdir -p plots/ä; printf 1,2 > metrics.csv; printf png > "plots/ä/loss 1.png"',
        'touch "$DSTACKWEB_ARTIFACTS/empty"; echo "$DSTACKWEB_ARTIFACTS"',
    )
    job.launch()
    end = job.end()
    assert job.api.files == {"metrics.csv": b"1,2", "plots/ä/loss 1.png": b"png", "empty": b""}
    assert "artifacts" not in end
    assert job.lines() == [f"{job.run_dir}/.dstackweb-artifacts/1"]
    names = [call.what for call in job.api.calls]
    assert names[-1] == "exit"
    assert names.count("artifacts") == 3


@pytest.mark.parametrize("command", ["exit 3", "kill -KILL $$"])
def test_files_of_a_job_that_failed_are_sent(box: MakeBox, command: str) -> None:
    job = keeping(box, 'echo half > "$DSTACKWEB_ARTIFACTS/checkpoint"', command)
    job.launch()
    assert job.end()["reason"] == "container_exited_with_error"
    assert job.api.files == {"checkpoint": b"half\n"}


def test_files_of_a_job_that_was_stopped_are_sent(box: MakeBox) -> None:
    job = keeping(box, "trap 'echo saved > $DSTACKWEB_ARTIFACTS/last; exit 0' TERM; sleep 60 & echo up; wait")
    job.launch()
    job.wait_for("up")
    job.api.action = {"action": "stop", "grace_s": 5, "reason": "stopped_by_user"}
    end = job.end(nudged=True)
    assert (end["exit_code"], end["reason"]) == (0, "stopped_by_user")
    assert job.api.files == {"last": b"saved\n"}


def test_without_the_key_in_the_spec_there_is_no_directory(box: MakeBox) -> None:
    job = box('echo "[$DSTACKWEB_ARTIFACTS]"')
    job.launch()
    job.end()
    assert job.lines() == ["[]"]
    assert not (job.run_dir / ".dstackweb-artifacts").exists()


def test_a_large_file_is_sent_in_pieces_and_as_it_is(box: MakeBox) -> None:
    size = 2 * CHUNK + 17
    job = keeping(box, f'head -c {size} /dev/urandom > "$DSTACKWEB_ARTIFACTS/model"')
    job.launch()
    job.end()
    assert job.api.files["model"] == (job.run_dir / ".dstackweb-artifacts/1/model").read_bytes()
    assert job.api.count("artifacts") == 4  # where to begin, and three pieces


def test_links_and_special_files_are_left_out_and_said(box: MakeBox) -> None:
    job = keeping(
        box,
        'cd "$DSTACKWEB_ARTIFACTS"; ln -s /etc/passwd users; ln -s /etc etc; mkfifo pipe; printf ok > file',
        "ln -s missing dangling; ln -s . loop; mkdir sub; ln -s ../../.. sub/up",
    )
    job.launch()
    job.end()
    assert job.api.files == {"file": b"ok"}
    assert left(job) == dict.fromkeys(["users", "etc", "pipe", "dangling", "loop", "sub/up"], "kind")


def test_a_folder_that_became_a_link_leads_nowhere(box: MakeBox) -> None:
    job = keeping(box, 'cd ..; rm -r "$DSTACKWEB_ARTIFACTS"; ln -s /etc "$DSTACKWEB_ARTIFACTS"')
    job.launch()
    job.end()
    assert job.api.count("artifacts") == 0


def test_names_that_can_not_be_shown_are_left_out(box: MakeBox) -> None:
    job = keeping(
        box,
        'cd "$DSTACKWEB_ARTIFACTS"; touch "$(printf \'new\\nline\')" "$(printf \'not\\377utf8\')"',
        "touch \"$(printf 'right\\342\\200\\256left.png')\" 'back\\slash' good",
    )
    job.launch()
    job.end()
    assert list(job.api.files) == ["good"]
    assert set(left(job).values()) == {"name"}
    assert set(left(job)) == {"new?line", "not\N{REPLACEMENT CHARACTER}utf8", "right?left.png", "back\\slash"}


def test_too_large_and_too_many_files_are_left_out(box: MakeBox) -> None:
    make = 'cd "$DSTACKWEB_ARTIFACTS"; for i in $(seq 100 299); do echo > $i; done; head -c 200 /dev/zero > 000'
    job = keeping(box, make, limits={"files": 11, "file": 100})
    job.launch()
    end = job.end()
    assert set(job.api.files) == {str(number) for number in range(100, 110)}
    assert end["artifacts"]["number"] == 191
    assert len(end["artifacts"]["left_out"]) == LISTED
    assert set(left(job).values()) == {"too_many"}


def test_a_file_over_its_limit_is_named_with_its_size(box: MakeBox) -> None:
    job = keeping(box, 'head -c 101 /dev/zero > "$DSTACKWEB_ARTIFACTS/big"', limits={"file": 100})
    job.launch()
    assert job.end()["artifacts"]["left_out"] == [{"path": "big", "why": "file_limit", "size": 101}]


def test_what_the_server_refuses_is_said_and_the_rest_is_sent(box: MakeBox) -> None:
    job = keeping(box, 'cd "$DSTACKWEB_ARTIFACTS"; echo 1 > a; echo 2 > b; echo 3 > c')
    job.api.refused = {"b": "project_quota"}
    job.launch()
    job.end()
    assert set(job.api.files) == {"a", "c"}
    assert left(job) == {"b": "project_quota"}


def test_a_killed_runner_is_followed_by_one_that_goes_on(box: MakeBox) -> None:
    """Between two pieces of a file: what has arrived is not sent again."""
    job = keeping(box, f'cd "$DSTACKWEB_ARTIFACTS"; echo 1 > a; head -c {3 * CHUNK} /dev/urandom > b; echo 3 > c')
    job.api.trouble = lambda what: 503 if what == "artifacts" and len(job.api.files.get("b", b"")) >= CHUNK else None
    job.launch()
    eventually(lambda: len(job.api.files.get("b", b"")) == CHUNK, every=0.01)
    job.kill()
    (job.run_dir / ".dstackweb-artifacts/1/c").unlink()
    calls = job.api.count("artifacts")
    job.api.trouble = lambda what: None
    job.launch()
    end = job.end(nudged=True)
    assert (end["exit_code"], end["reason"]) == (0, "done_by_runner")
    assert set(job.api.files) == {"a", "b"}
    assert job.api.files["b"] == (job.run_dir / ".dstackweb-artifacts/1/b").read_bytes()
    assert job.api.count("artifacts") - calls == 4  # a once more; of b where to begin, and two pieces


def test_a_runner_that_was_killed_with_its_commands_leaves_their_files_to_the_next(box: MakeBox) -> None:
    job = keeping(box, 'echo early > "$DSTACKWEB_ARTIFACTS/early"; echo up; sleep 600')
    job.launch()
    job.wait_for("up")
    job.kill()
    job.launch()
    assert job.end()["reason"] == "instance_unreachable"
    assert job.api.files == {"early": b"early\n"}


def test_the_end_is_reported_when_the_time_for_artifacts_is_over(box: MakeBox) -> None:
    job = keeping(box, 'cd "$DSTACKWEB_ARTIFACTS"; echo 1 > a; echo 2 > b', limits={"seconds": 0.5})
    job.api.trouble = lambda what: 503 if what == "artifacts" else None
    job.launch()
    assert job.end(nudged=True)["exit_code"] == 0
    assert left(job) == {"a": "time", "b": "time"}


def test_heartbeats_go_on_while_a_piece_is_not_answered(box: MakeBox) -> None:
    job = keeping(box, 'echo 1 > "$DSTACKWEB_ARTIFACTS/a"')
    before: list[int] = []

    def slow(what: str) -> None:
        if what == "artifacts" and not before:
            before.append(job.api.count("heartbeat"))
            eventually(lambda: job.api.count("heartbeat") > before[0] + 2, every=0.01)

    job.api.trouble = slow
    job.launch()
    job.end()
    assert job.api.files == {"a": b"1\n"}


def test_a_job_that_the_server_has_ended_sends_nothing_more(box: MakeBox) -> None:
    job = keeping(box, 'cd "$DSTACKWEB_ARTIFACTS"; echo 1 > a; echo 2 > b')
    job.api.trouble = lambda what: 409 if what == "artifacts" else None
    job.launch()
    job.wait_until_gone()
    assert job.api.count("artifacts") == 0
    assert "the API rejected this runner" in job.said()


def test_what_an_attempt_finds_in_its_folder_is_removed(tmp_path: Path) -> None:
    """Such as what was shipped as code: artifacts are made by the commands."""
    (tmp_path / ".dstackweb-artifacts/2/deep").mkdir(parents=True)
    (tmp_path / ".dstackweb-artifacts/1").mkdir()
    for attempt in (1, 2):
        (tmp_path / f".dstackweb-artifacts/{attempt}/file").write_text("x")
    make_folder(str(tmp_path), 2, ME)
    assert [path.name for path in (tmp_path / ".dstackweb-artifacts/2").iterdir()] == []
    assert (tmp_path / ".dstackweb-artifacts/1/file").exists()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").touch()
    for place in (tmp_path / "a", tmp_path / "b"):
        place.mkdir()
    (tmp_path / "a/.dstackweb-artifacts").symlink_to(elsewhere)
    (tmp_path / "b/.dstackweb-artifacts").mkdir()
    (tmp_path / "b/.dstackweb-artifacts/1").symlink_to(elsewhere)
    for place in ("a", "b"):
        make_folder(str(tmp_path / place), 1, ME)
    assert [path.name for path in elsewhere.iterdir()] == ["mine"]
    assert not (tmp_path / "b/.dstackweb-artifacts/1").is_symlink()


def test_deep_folders_and_very_many_files_are_looked_at_only_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifacts, "SEEN_MAX", 50)
    make_folder(str(tmp_path), 1, ME)
    top = tmp_path / ".dstackweb-artifacts/1"
    deepest = top / "/".join(["d"] * 40)
    deepest.mkdir(parents=True)
    (deepest / "file").touch()
    out = LeftOut()
    assert find(str(tmp_path), 1, 1000, out) == []
    assert [one["why"] for one in out.files] == ["name"]
    for number in range(100):
        (top / f"{number:03}").touch()
    out = LeftOut()
    found = find(str(tmp_path), 1, 1000, out)
    assert len(found) < 100
    assert "too_many" in {one["why"] for one in out.files}


@examples(200)
@given(st.text(max_size=40) | st.lists(st.sampled_from(["..", ".", "", "a", "b c", "\0", "é"])).map("/".join))
def test_a_safe_path_stays_below_any_folder_and_is_shown_as_it_is(path: str) -> None:
    if is_safe(path):
        joined = os.path.normpath(f"/top/{path}")
        assert joined == f"/top/{path}"
        assert json.loads(json.dumps(path)) == path
        assert len(path.splitlines()) == 1


def test_paths_are_limited() -> None:
    assert is_safe("a/b.png")
    for bad in ("", "/a", "a/", "a//b", "../a", "a/..", "./a", "a\\b", "a\nb", "x" * 256, "a/" * 31 + "a/a/a"):
        assert not is_safe(bad), bad
    assert not is_safe("/".join(["é" * 100] * 3))
    assert PATH_MAX == 512
