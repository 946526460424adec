"""`dstackweb move` and `dstackweb queue`: the order and the settings of a queue from a shell (R26)."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

import pytest

from dstackweb.accounts.models import Project, User
from dstackweb.runs import services
from dstackweb.runs.models import Queue, Run
from dstackweb.runs.queue import reorder
from dstackweb.runs.queue.move_preview import MoveEffect
from tests.cli.conftest import Cli
from tests.factories import join, make_run, make_user
from tests.support import REPO


@pytest.fixture
def runs(project: Project, ada: User) -> dict[str, Run]:
    """a, c and e are ada's; b and d are bob's."""
    bob = join(project, make_user("bob"))
    return {name: make_run(project, user, name) for name, user in zip("abcde", [ada, bob] * 3, strict=False)}


@pytest.fixture
def manager(connect: Callable[..., Cli], project: Project) -> Cli:
    return connect(join(project, make_user("mona"), "manager"))


def order() -> str:
    return "".join(Run.objects.filter(status="submitted").order_by("rank", "id").values_list("name", flat=True))


def test_a_move_is_previewed_made_and_undone(manager: Cli, runs: dict[str, Run]) -> None:
    expected = "e: position 5 → 2; bob's b 2 → 3, ada's c 3 → 4, bob's d 4 → 5\n"
    assert manager.ok("move", "e", "--before", "b", "--dry-run") == expected
    assert order() == "abcde"
    done = manager("move", "e", "--before", "b")
    assert (done.exit_code, done.stdout) == (0, expected)
    assert "dstackweb move --undo" in done.stderr
    assert order() == "aebcd"
    assert manager.ok("move", "--undo") == "e: position 2 → 5\n"
    assert order() == "abcde"
    again = manager("move", "--undo")
    assert (again.exit_code, "you moved nothing" in again.stderr, "--queue NAME" in again.stderr) == (1, True, True)
    assert "--queue NAME" not in manager("move", "--undo", "--queue", "default").stderr


def test_several_runs_move_together_and_priority_changes_are_shown(manager: Cli, runs: dict[str, Run]) -> None:
    output = manager.ok("move", "d", "e", "--top")
    assert output.splitlines()[0] == "d: position 4 → 1, priority 50 → 51"
    assert output.splitlines()[1].startswith("e: position 5 → 2, priority 50 → 51; ada's a 1 → 3, ")
    assert order() == "deabc"
    assert manager.ok("move", "c", "--bottom", "--dry-run") == ""
    assert "already in this position" in manager("move", "c", "--bottom").stderr


def test_far_back_a_move_is_reported_without_positions(
    manager: Cli, runs: dict[str, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reorder, "MAX_COUNTED", 2)
    assert manager.ok("move", "e", "--before", "d") == "e: moved\n"
    assert manager.ok("move", "d", "--top") == "d: now at position 1, priority 50 → 51\n"


def test_a_members_move_changes_places_with_their_own_runs(cli: Cli, runs: dict[str, Run]) -> None:
    assert cli.ok("move", "e", "--top") == "e: position 5 → 1; ada's a 1 → 3, ada's c 3 → 5\n"
    assert order() == "ebadc"
    output = cli("move", "c", "--before", "b")
    assert "c: position 5 → 3; ada's a 3 → 5" in output.stdout
    assert "your nearest position" in output.stderr
    for refused, why in ((("b", "--top"), "belongs to bob"), (("a", "--before", "d"), "only managers can move")):
        answer = cli("move", *refused)
        assert (answer.exit_code, why in answer.stderr) == (1, True)


def test_a_concurrently_changed_run_is_not_moved(
    cli: Cli, runs: dict[str, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    move = reorder.move

    def late(*args: object) -> MoveEffect:
        services.set_priority(runs["e"], runs["e"].user, "member", 40)
        return move(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(reorder, "move", late)
    output = cli("move", "e", "--top")
    assert output.exit_code == 1
    assert "run e was changed by ada since you looked: its priority is 40" in output.stderr
    assert "run the command again" in output.stderr


@pytest.mark.parametrize(
    "args",
    [
        ("a",),
        ("--top",),
        ("a", "--top", "--bottom"),
        ("a", "--undo"),
        ("--undo", "--top"),
        (),
        ("a", "--top", "--queue=x"),
    ],
)
def test_a_move_needs_runs_and_exactly_one_target(cli: Cli, args: tuple[str, ...]) -> None:
    assert cli("move", *args).exit_code == 2


def test_managers_change_a_queues_settings_and_all_members_see_them(
    manager: Cli, cli: Cli, runs: dict[str, Run]
) -> None:
    manager.ok("queue", "--pause", "--drain", "--ageing", "strict", "--max-running", "4", "--max-gpus-per-user", "2")
    output = cli("queue").stderr
    for text in (
        "paused:",
        "draining:",
        "at most 4 runs at once",
        "at most 2 GPUs at once per member",
        "strict priority",
    ):
        assert text in output
    manager.ok(
        "queue", "default", "--resume", "--undrain", "--ageing", "15", "--max-running", "none", "--preempt-points", "5"
    )
    output = cli("queue").stderr
    assert "+1 priority per 15 min waiting" in output
    assert "displaces preemptible runs whose priority is at least 5 lower" in output
    assert "at most 2 GPUs" in output
    assert "paused" not in output
    output = manager("queue", "--cohort", "team", "--max-gpus", "4", "--reclaim", "lower-priority").stderr
    assert "cohort team; takes back lent GPUs from preemptible runs of lower priority" in output
    assert "4 runs" not in output
    refused = cli("queue", "--pause")
    assert (refused.exit_code, "only managers" in refused.stderr) == (1, True)
    assert manager("queue", "--ageing", "soon").exit_code == 2
    assert manager("queue", "--ageing", "0").exit_code == 1


def test_queues_are_made_and_listed(manager: Cli, cli: Cli, runs: dict[str, Run]) -> None:
    manager.ok("queue", "night", "--create", "--max-running", "1")
    lines = cli.ok("queue", "--list").splitlines()
    assert [line.split()[:4] for line in lines] == [
        ["NAME", "WAIT", "PENDING", "PLACED"],
        ["default", "5", "0", "0"],
        ["night", "0", "0", "0"],
    ]
    assert "at most 1 run at once;" in lines[2]


@pytest.mark.parametrize("setting", [("--pause",), ("--create",), ("--max-gpus", "1")])
def test_settings_given_with_list_are_refused(manager: Cli, setting: tuple[str, ...]) -> None:
    refused = manager("queue", "default", "--list", *setting)
    assert (refused.exit_code, "--list" in refused.stderr) == (2, True)
    assert not Queue.objects.filter(paused=True).exists()


def test_a_number_of_any_length_is_refused_with_a_message(manager: Cli) -> None:
    digits = "9" * 5000
    for args in (("--ageing", digits), ("--max-running", digits), ("--limit", digits)):
        refused = manager("queue", *args)
        assert (refused.exit_code, digits in refused.stderr) == (2, False)
    assert manager("priority", "a", digits).exit_code == 2


def test_a_refused_user_reads_which_role_is_needed(connect: Callable[..., Cli], project: Project) -> None:
    viewer = connect(join(project, make_user("vic"), "viewer"))
    for args in (("--pause",), ("night", "--create")):
        refused = viewer("queue", *args)
        assert (refused.exit_code, "only managers" in refused.stderr) == (1, True)


@pytest.mark.usefixtures("live_server")
def test_a_terminal_with_few_characters_still_shows_the_change(cli: Cli, runs: dict[str, Run]) -> None:
    process = cli.spawn("priority", "a", "60", PYTHONIOENCODING="latin-1")
    out, output = process.communicate(timeout=20)
    assert (process.returncode, output) == (0, b"")
    assert out == b"a: priority 50 ? 60, position 1 ? 1 in default\n"


def test_ctrl_c_at_the_question_for_a_token_exits_with_130() -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", "from dstackweb.cli.main import app; app()", "login", "http://127.0.0.1:9"],
        stdin=theirs,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(REPO), "DSTACKWEB_TOKEN": ""},
        start_new_session=True,
    )
    try:
        assert process.stderr is not None
        output = b""
        while b"Token: " not in output and (more := os.read(process.stderr.fileno(), 4096)):
            output += more
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.communicate()
        os.close(ours)
        os.close(theirs)


def test_fair_share_is_set_and_shown_with_each_members_share(
    manager: Cli, cli: Cli, project: Project, ada: User
) -> None:
    manager.ok("queue", "--fair-share", "60", "--half-life", "3")
    bob = join(project, make_user("bob"))
    make_run(project, bob, "small", resources={"gpu": 1})
    for name in ("first", "second"):
        make_run(project, ada, name, resources={"gpu": 4})
    output = cli("queue")
    assert "fair share: up to 1 h behind, half-life 3 days" in output.stderr
    assert [line.split() for line in output.stdout.splitlines() if line.startswith(("FAIR", "ada", "bob"))] == [
        ["FAIR", "SHARE", "GPU-H", "USED", "HELD", "QUEUED", "BEHIND"],
        ["ada", "8.0", "0.0", "0", "8", "52", "min"],
        ["bob", "1.0", "0.0", "0", "1"],
    ]
    assert "fair share: 30 min behind" in next(line for line in output.stdout.splitlines() if " second " in line)
    shown = cli.ok("show", "second")
    assert "recently used 0 GPU-h, 8 GPUs queued; the median is 4 GPU-h: 30 min behind" in shown
    cli.file("type: task\ncommands: ['true']\nresources: {gpu: 2}\n")
    planned = cli.ok("apply", "-f", "run.yaml", "--dry-run")
    assert "Fair share: recently used 0 GPU-h, 10 GPUs queued; the median is 2 GPU-h: 48 min behind" in planned
    manager.ok("queue", "--fair-share", "off")
    assert "fair share" not in cli("queue").stderr + cli("queue").stdout
    assert manager("queue", "--fair-share", "soon").exit_code == 2


def test_runs_go_to_another_queue_after_a_preview(manager: Cli, runs: dict[str, Run]) -> None:
    manager.ok("queue", "night", "--create")
    output = manager("move", "a", "c", "--to", "night", "--dry-run")
    assert output.stdout == "a: position 1 → position 1 in night\nc: position 3 → position 2 in night\n"
    assert "Dry run: nothing was moved." in output.stderr
    assert manager("move", "b", "--to", "night").stdout == "b: position 2 → position 1 in night\n"
    assert manager("move", "--member", "bob", "--to", "night").exit_code == 0
    assert manager("move", "--member", "bob", "--top").exit_code == 2
    names = set(Run.objects.filter(queue__name="night").values_list("name", flat=True))
    assert names == {"b", "d"}
