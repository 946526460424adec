"""What people do to waiting runs on the queue page: moves, their previews, priorities in bulk, stopping, undoing."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from django.test import Client

from dstackweb.accounts.models import Project, Session, User
from dstackweb.runs import services
from dstackweb.runs.codes import RunEventKind
from dstackweb.runs.concurrency import etag
from dstackweb.runs.models import Move, Run
from dstackweb.runs.selectors import in_order
from dstackweb.runs.transitions import record
from dstackweb.web.queue import views
from tests.factories import join, make_project, make_run, make_user
from tests.forms import send_by_script, submit
from tests.web.conftest import HTMX
from tests.web.queue.rows import QUEUE, act, token

pytestmark = pytest.mark.django_db
SignIn = Callable[[User], Client]
CHANGE = "/p/main/queues/default/change/"


def act_anyway(client: Client, *runs: Run, **values: Any) -> Any:
    """Send what no page sends: for runs that the reader may not change, or without what the action needs."""
    tokens = ",".join(f"{run.pk}.{etag(run)}" for run in runs)
    return client.post(CHANGE, {"run": tokens, **values}, headers=HTMX)


def toast_of(response: Any) -> dict[str, Any]:
    return json.loads(response["HX-Trigger"])["toast"]


def press_undo(client: Client, undo: dict[str, Any]) -> Any:
    """Send what static/js/undo.js sends for the button in a notice."""
    return send_by_script(client, QUEUE, undo["url"], {"move": undo["move"]})


def names(project: Project) -> list[str]:
    return list(in_order(project.queues.get()).values_list("name", flat=True))


@pytest.fixture
def five(project: Project, ann: User, mia: User) -> dict[str, Run]:
    """a, c and e are ann's; b and d are mia's."""
    return {name: make_run(project, ann if name in "ace" else mia, name) for name in "abcde"}


def test_raising_a_priority_moves_the_run_and_shows_both_positions(
    five: dict[str, Run], project: Project, ann: User, as_user: SignIn
) -> None:
    """R24, R26: priorities change at run time, from the web."""
    answer = act(as_user(ann), five["e"], do="priority", priority="60")
    assert answer.status_code == 200
    assert toast_of(answer)["text"] == "Priority of e set to 60: position 5 → 1"
    assert names(project) == ["e", "a", "b", "c", "d"]
    page = answer.content.decode()
    assert page.index("/runs/e/") < page.index("/runs/a/")
    assert f'<tr id="run-{five["e"].pk}" class="moved">' in page


def test_a_stale_change_is_refused_with_the_differences_and_the_current_list(
    five: dict[str, Run], ann: User, mia: User, as_user: SignIn
) -> None:
    run, client = five["c"], as_user(ann)
    seen = client.get(QUEUE)
    services.set_priority(run, mia, "manager", 20)
    for values in ({"do": "priority", "priority": "60"}, {"do": "top"}):
        answer = act(client, run, page=seen, **values)
        assert answer.status_code == 412
        assert "changed by mia" in toast_of(answer)["text"]
        assert token(run, client) in answer.content.decode()
        assert Run.objects.get(pk=run.pk).priority == 20


def test_an_action_that_changes_nothing_still_answers_with_the_list(
    five: dict[str, Run], ann: User, as_user: SignIn
) -> None:
    """An empty answer would empty the page: an action is no poll, even if it says which version it shows."""
    client = as_user(ann)
    page = client.get(QUEUE)
    values = {"run": token(five["a"], client, page), "do": "priority", "priority": "50"}
    answer = send_by_script(client, page, CHANGE, values, {"HX-PTag": page["HX-PTag"]})
    assert answer.status_code == 200
    assert "/runs/a/" in answer.content.decode()


@pytest.mark.parametrize(
    ("values", "order"),
    [
        ({"do": "top"}, "dabce"),
        ({"do": "bottom"}, "abced"),
        ({"do": "up"}, "abdce"),
        ({"do": "down"}, "abced"),
        ({"do": "before", "name": "b"}, "adbce"),
        ({"do": "after", "name": "1"}, "adbce"),
        ({"do": "before", "name": "#2"}, "adbce"),
    ],
)
def test_a_manager_puts_a_run_exactly_there(
    five: dict[str, Run], project: Project, mia: User, as_user: SignIn, values: dict[str, str], order: str
) -> None:
    answer = act(as_user(mia), five["d"], **values)
    assert answer.status_code == 200
    assert "".join(names(project)) == order
    assert "moved by mia" in answer.content.decode()


def test_a_members_moves_keep_the_positions_of_other_members_runs(
    five: dict[str, Run], project: Project, ann: User, as_user: SignIn
) -> None:
    client = as_user(ann)
    act(client, five["e"], do="up")
    assert names(project) == ["a", "b", "e", "d", "c"]
    act(client, five["e"], do="top")
    assert names(project) == ["e", "b", "a", "d", "c"]
    refused = act(client, five["e"], do="up")
    assert refused.status_code == 422
    assert toast_of(refused)["text"] == "It is already first."


def test_a_preview_matches_the_outcome_of_the_move(five: dict[str, Run], mia: User, as_user: SignIn) -> None:
    client = as_user(mia)
    make_run(five["a"].project, mia, "urgent", role="manager", priority=70)
    query = {"run": token(five["e"], client), "do": "top"}
    shown = client.get("/p/main/queues/default/preview/", query).json()
    assert shown["text"].startswith("priority 50 → 70, position 6 → 1; your urgent moves back from 1 to 2")
    assert shown["priorities"] == {str(five["e"].pk): 70}
    assert shown["places"][str(five["e"].pk)] == 1
    assert client.get("/p/main/queues/default/preview/", query).json() == shown  # it changed nothing
    moved = toast_of(act(client, five["e"], do="top"))
    assert moved["text"] == "e moved from position 6 to 1, priority 50 → 70"


def test_a_preview_shows_why_the_move_is_forbidden(five: dict[str, Run], ann: User, as_user: SignIn) -> None:
    query = {"run": f"{five['b'].pk}.{etag(five['b'])}", "do": "top"}
    shown = as_user(ann).get("/p/main/queues/default/preview/", query).json()
    assert shown["refused"]
    assert "belongs to mia" in shown["text"]


def test_several_runs_move_together_in_their_order(
    five: dict[str, Run], project: Project, mia: User, as_user: SignIn
) -> None:
    answer = act(as_user(mia), five["d"], five["b"], do="top")
    assert names(project) == ["b", "d", "a", "c", "e"]
    assert toast_of(answer)["text"] == "2 runs moved to positions 1–2"


def test_moved_runs_that_end_up_apart_are_only_counted(five: dict[str, Run], ann: User, as_user: SignIn) -> None:
    assert toast_of(act(as_user(ann), five["c"], five["e"], do="top"))["text"] == "2 runs moved"


def test_priorities_of_a_choice_are_set_all_or_none(
    five: dict[str, Run], project: Project, ann: User, mia: User, as_user: SignIn
) -> None:
    answer = act(as_user(mia), five["a"], five["d"], do="priority", priority="80")
    assert toast_of(answer)["text"] == "Priority of 2 runs set to 80"
    refused = act_anyway(as_user(ann), five["c"], five["b"], do="priority", priority="10")
    assert refused.status_code == 403
    assert set(Run.objects.filter(name__in="bc").values_list("priority", flat=True)) == {50}
    assert "/runs/a/" in refused.content.decode()


def test_a_choice_is_stopped_all_or_none(five: dict[str, Run], ann: User, mia: User, as_user: SignIn) -> None:
    assert act_anyway(as_user(ann), five["a"], five["b"], do="stop").status_code == 403
    assert not Run.objects.filter(status="terminated").exists()
    answer = act(as_user(mia), five["a"], five["b"], do="stop")
    assert toast_of(answer)["text"] == "2 runs stopped"
    assert set(Run.objects.filter(status="terminated").values_list("name", flat=True)) == {"a", "b"}


def test_a_move_and_a_priority_change_can_be_undone(
    five: dict[str, Run], project: Project, ann: User, mia: User, as_user: SignIn
) -> None:
    client = as_user(mia)
    for values in ({"do": "top"}, {"do": "priority", "priority": "90"}):
        undo = toast_of(act(client, five["e"], **values))["undo"]
        assert undo["seconds"] == 10
        assert names(project)[0] == "e"
        assert press_undo(as_user(ann), undo).status_code == 403
        answer = press_undo(client, undo)
        assert answer.status_code == 200
        assert toast_of(answer)["text"] == "Undone: e"
        assert names(project) == list("abcde")


def test_runs_changed_since_the_action_are_not_undone(
    five: dict[str, Run], ann: User, mia: User, as_user: SignIn
) -> None:
    client = as_user(ann)
    undo = toast_of(act(client, five["a"], do="priority", priority="60"))["undo"]
    services.set_priority(Run.objects.get(name="a"), mia, "manager", 10)
    answer = press_undo(client, undo)
    assert answer.status_code == 412
    assert "changed by mia" in toast_of(answer)["text"]
    assert Run.objects.get(name="a").priority == 10


def test_viewers_change_nothing_and_get_no_controls(five: dict[str, Run], project: Project, as_user: SignIn) -> None:
    client = as_user(join(project, make_user("vic"), "viewer"))
    page = client.get(QUEUE).content.decode()
    assert "grip" not in page
    assert 'name="run"' not in page
    assert "sortable" not in page
    for values in ({"do": "top"}, {"do": "stop"}, {"do": "priority", "priority": "1"}):
        assert act_anyway(client, five["a"], **values).status_code == 403
    assert not Move.objects.exists()


def test_runs_of_another_project_cannot_be_changed(five: dict[str, Run], mia: User, as_user: SignIn) -> None:
    other = make_run(make_project("other"), mia, "elsewhere", role="manager")
    assert act_anyway(as_user(mia), other, do="stop").status_code == 404
    assert act_anyway(as_user(mia), five["a"], do="before", anchor=str(other.pk)).status_code == 404
    assert Run.objects.get(pk=other.pk).status == "submitted"


@pytest.mark.parametrize("values", [{}, {"do": "sideways"}, {"do": "before", "name": "nobody"}, {"do": "before"}])
def test_an_invalid_action_is_refused_with_a_message(
    five: dict[str, Run], mia: User, as_user: SignIn, values: dict[str, str]
) -> None:
    answer = act_anyway(as_user(mia), five["a"], **values)
    assert answer.status_code in (404, 422)
    assert toast_of(answer)["text"]


def test_without_scripts_the_rows_own_buttons_work(
    five: dict[str, Run], project: Project, ann: User, as_user: SignIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = as_user(ann)

    def press(button: str, page: str = QUEUE, **changes: Any) -> Any:
        return submit(client, page, changes, having="run", button=button, scripts=False)

    monkeypatch.setattr(views, "PER_PAGE", 2)
    answer = press(f"raise={five['c'].pk}", f"{QUEUE}?page=2")
    assert (answer.status_code, answer["Location"]) == (303, "/p/main/queue/?page=2")
    monkeypatch.undo()
    assert "Priority of c set to 51" in client.get(QUEUE).content.decode()
    press(f"lower={five['c'].pk}")
    assert Run.objects.get(name="c").priority == 50
    press("Set priority", run=[token(five["c"], client), token(five["e"], client)], priority="40")
    assert names(project) == list("abdce")
    press("do=stop", run=[token(five["c"], client)])
    assert Run.objects.get(name="c").status == "terminated"
    press("do=top", run=[token(five["e"], client)])
    assert names(project) == ["e", "b", "d", "a"]


def test_a_position_that_only_looks_like_a_number_is_no_run(
    five: dict[str, Run], project: Project, ann: User, as_user: SignIn
) -> None:
    client = as_user(ann)
    for name in ("²", "9" * 5000):
        assert act(client, five["e"], do="before", name=name).status_code == 404
        assert client.get(QUEUE, headers={**HTMX, "DW-Announced": name}).status_code == 200
    assert act(client, five["e"], do="before", name="3").status_code == 200
    assert names(project) == ["a", "b", "e", "d", "c"]


def test_megabytes_that_were_typed_are_not_kept_with_the_session(
    five: dict[str, Run], ann: User, as_user: SignIn
) -> None:
    """The first requests come from no page: only scripts send `before`, and they keep no message with the session."""
    client = as_user(ann)
    for _ in range(3):
        client.post(CHANGE, {"run": token(five["e"], client), "do": "before", "name": "x" * 1_000_000})
    refused = act(client, five["e"], do="priority", priority="x" * 1_000_000)
    assert len(toast_of(refused)["text"]) < 3000
    assert len(Session.objects.get(user=ann).session_data) < 20_000


def test_a_poll_announces_new_events_of_the_readers_own_runs(
    five: dict[str, Run], ann: User, mia: User, as_user: SignIn
) -> None:
    client = as_user(ann)
    first = client.get(QUEUE).content.decode()
    heard = first.partition('data-event="')[2].partition('"')[0]
    services.stop(five["c"], mia, "manager")
    services.stop(five["b"], mia, "manager")
    services.stop(five["e"], ann, "member")
    record(five["a"], RunEventKind.DISPLACED, {"run": "urgent", "user": "mia"})
    poll = client.get(QUEUE, headers={**HTMX, "DW-Announced": heard}).content.decode()
    shown = poll.partition('id="announcements"')[2].partition("</div>")[0]
    assert "c: terminated" in shown
    assert "b:" not in shown  # somebody else's
    assert "a: displaced by urgent of mia" in shown
    assert "e:" not in shown  # one's own act was announced by its notice
