"""Two runs side by side."""

from __future__ import annotations

import datetime as dt

import pytest
from django.utils import timezone
from hypothesis import given, strategies as st

from dstackweb.accounts.models import Project, User
from dstackweb.lib.errors import NotFound
from dstackweb.runs import services
from dstackweb.runs.comparison import LineOf, compare, find_pair, line_by_line
from dstackweb.runs.models import Archive, Job, Run
from dstackweb.runs.states import RunStatus
from tests.factories import join, make_host, make_project, make_run, make_user, place_all

pytestmark = pytest.mark.django_db


@pytest.fixture
def project() -> Project:
    return make_project("main")


@pytest.fixture
def ada(project: Project) -> User:
    return join(project, make_user("ada"))


def test_settings_that_differ_are_marked_with_their_lines(project: Project, ada: User) -> None:
    left = make_run(project, ada, "a", commands=["prepare data", "train --lr 1e-3"], resources={"cpu": 1})
    right = make_run(project, ada, "b", commands=["prepare data", "train --lr 1e-4"], env={"LR": "1"})
    found = {one.key: one for one in compare(left, right, timezone.now()).settings}
    assert {key for key, one in found.items() if one.differs} == {"commands", "env", "resources.cpu"}
    assert [(line.of.value, line.text) for line in found["commands"].lines] == [
        ("both", "prepare data"),
        ("left", "train --lr 1e-3"),
        ("right", "train --lr 1e-4"),
    ]
    assert (found["env"].left, found["env"].right, found["env"].lines) == (None, "LR: 1", [])
    assert not {"name", "type"} & set(found)


def test_a_changed_priority_and_other_code_are_differences(project: Project, ada: User) -> None:
    left, right = make_run(project, ada, "a"), make_run(project, ada, "b")
    left.archive = Archive.objects.create(project=project, sha256="ab" * 32, size=1)
    left = services.set_priority(left, ada, "member", 70)
    left.archive = Archive.objects.get()
    found = {one.key: (one.left, one.right) for one in compare(left, right, timezone.now()).settings if one.differs}
    assert found == {"priority": ("70", "50"), "code": ("abababababab", None)}


def test_times_are_those_of_the_newest_attempt_and_go_on_until_its_end(project: Project, ada: User) -> None:
    make_host("box-1")
    placed, waiting = make_run(project, ada, "placed"), make_run(project, ada, "waiting", resources={"cpu": 999})
    place_all()
    at = timezone.now()

    def ago(seconds: int) -> dt.datetime:
        return at - dt.timedelta(seconds=seconds)

    Run.objects.update(submitted_at=ago(100), queued_at=ago(100))
    Run.objects.filter(pk=placed.pk).update(ended_at=ago(10), status=RunStatus.DONE)
    Job.objects.update(placed_at=ago(90), started_at=ago(85))
    found = compare(*find_pair(project, "placed", "waiting"), at)
    left, right = found.left, found.right
    assert (left.waited_s, left.starting_s, left.ran_s, left.total_s) == (10, 5, 75, 90)
    assert (right.waited_s, right.starting_s, right.ran_s, right.total_s) == (100, None, None, 100)
    assert (left.place, right.place) == ("box-1", "")
    assert waiting.name == right.run.name


def test_a_run_alone_is_compared_with_the_one_before_of_its_name(project: Project, ada: User) -> None:
    runs = []
    for _again in range(3):
        runs.append(make_run(project, ada, "again"))
        services.stop(runs[-1], ada, "member")
    assert find_pair(project, "again", "") == (runs[1], runs[2])
    assert find_pair(project, str(runs[1].uid), "") == (runs[0], runs[1])
    with pytest.raises(NotFound, match="Name the run"):
        find_pair(project, str(runs[0].uid), "")
    with pytest.raises(NotFound):
        find_pair(project, "again", "of-another-project")


texts = st.lists(st.sampled_from(["a", "b", "c"]), max_size=8).map("\n".join)


@given(texts, texts)
def test_the_lines_of_a_side_are_its_text(left: str, right: str) -> None:
    lines = list(line_by_line(left, right))
    assert [line.text for line in lines if line.of != LineOf.RIGHT] == left.splitlines()
    assert [line.text for line in lines if line.of != LineOf.LEFT] == right.splitlines()


def test_long_texts_are_compared_line_by_line() -> None:
    left = [f"step {number}" for number in range(5000)]
    right = [*left[:2500], "one more", *left[2500:4000], *left[4001:]]
    found = [(line.of, line.text) for line in line_by_line("\n".join(left), "\n".join(right)) if line.of != LineOf.BOTH]
    assert found == [(LineOf.RIGHT, "one more"), (LineOf.LEFT, "step 4000")]


def test_texts_that_would_take_minutes_to_compare_are_shown_one_after_the_other() -> None:
    """A line that is repeated a thousand times, matched one by one with those of the other text."""
    left = ["begin", *["a"] * 1000, "end"]
    right = [line for number in range(500) for line in ("a", str(number))]
    lines = list(line_by_line("\n".join(left), "\n".join(right)))
    assert [line.text for line in lines if line.of == LineOf.LEFT] == left
    assert [line.text for line in lines if line.of == LineOf.RIGHT] == right


def test_texts_of_very_many_lines_are_shown_as_they_are(project: Project, ada: User) -> None:
    left, right = make_run(project, ada, "a", commands=["a\n" * 5_000]), make_run(project, ada, "b", commands=["b\nc"])
    (commands,) = (one for one in compare(left, right, timezone.now()).settings if one.differs)
    assert (commands.key, commands.right, commands.lines) == ("commands", "b\nc", [])
    assert commands.left is not None
