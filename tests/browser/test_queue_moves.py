"""Moving waiting runs by hand and by keys: what is seen first, what is done, what is taken back, who is notified."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Locator, Page, Route, expect

from dstackweb.accounts.models import Project, User
from dstackweb.runs import services
from dstackweb.runs.models import Run
from dstackweb.runs.selectors import in_order
from tests.browser import demo
from tests.browser.conftest import Complaints
from tests.browser.support import accessibility_faults, sign_in
from tests.factories import join, make_project, make_run, make_user
from tests.runs.sweeps.test_sweeps import make_sweep

pytestmark = pytest.mark.django_db(transaction=True)

FOCUSED = """(() => {
  const { activeElement: it } = document, ids = it.getAttribute("aria-labelledby");
  return ids ? ids.split(" ").map((id) => document.getElementById(id).textContent).join(" ") : it.tagName;
})()"""


@pytest.fixture
def project(transactional_db: None) -> Project:
    return make_project("main")


@pytest.fixture
def mia(project: Project) -> User:
    return join(project, make_user("mia", password=demo.PASSWORD), "manager")


@pytest.fixture
def five(project: Project, mia: User) -> dict[str, Run]:
    """In this order; c belongs to ann."""
    ann = join(project, make_user("ann", password=demo.PASSWORD))
    return {name: make_run(project, ann if name == "c" else mia, name) for name in "abcde"}


@pytest.fixture
def page(live_server, five: dict[str, Run], new_page: Callable[..., Page]) -> Page:
    """The queue page of a manager."""
    page = new_page()
    sign_in(page, live_server.url, "mia")
    page.goto(f"{live_server.url}/p/main/queue/")
    return page


def shown(page: Page) -> Locator:
    return page.locator("#waiting tr:not(.sortable-fallback) .q-run > a")


def grip(page: Page, name: str) -> Locator:
    return page.get_by_role("button", name=f"Move {name}", exact=True)


def more(page: Page, name: str) -> Locator:
    return page.get_by_role("button", name=f"Actions for {name}", exact=True)


def order(project: Project) -> str:
    return "".join(in_order(project.queues.get()).values_list("name", flat=True))


def take(page: Page, name: str, over: str) -> None:
    """Drag a row to the place of another one and hold it there."""
    start, end = grip(page, name).bounding_box(), grip(page, over).bounding_box()
    assert start
    assert end
    page.mouse.move(start["x"] + 6, start["y"] + 6)
    page.mouse.down()
    page.mouse.move(start["x"] + 8, start["y"] + (20 if end["y"] > start["y"] else -8), steps=4)
    page.mouse.move(end["x"] + 8, end["y"] + 8, steps=10)


def test_dragging_a_row_previews_the_move_and_undo_reverts_it(page: Page, project: Project) -> None:
    """R24."""
    take(page, "e", over="b")
    expect(page.locator(".would")).to_have_text("position 5 → 2; your b moves back from 2 to 3, 2 other runs move")
    expect(page.locator("#say")).to_contain_text("position 5 → 2")
    assert accessibility_faults(page) == []
    assert order(project) == "abcde"
    page.mouse.up()
    expect(shown(page)).to_have_text(list("aebcd"))
    expect(page.get_by_text("e moved from position 5 to 2")).to_be_visible()
    assert page.evaluate(FOCUSED) == "Move e"
    page.get_by_role("button", name="Undo").press("Enter")
    expect(shown(page)).to_have_text(list("abcde"))
    assert order(project) == "abcde"
    assert page.evaluate(FOCUSED) == "Move e"  # and not nowhere, now that the button is gone


def test_the_first_drag_works_also_where_it_has_to_wait_for_sortablejs(page: Page, project: Project) -> None:
    waiting: list[Route] = []
    page.route("**/sortable*.js", lambda route: waiting.append(route))
    start, end = grip(page, "e").bounding_box(), grip(page, "b").bounding_box()
    assert start
    assert end
    assert page.evaluate("typeof Sortable") == "undefined"
    with page.expect_request("**/sortable*.js"):
        page.mouse.move(start["x"] + 6, start["y"] + 6)
        page.mouse.down()
    page.mouse.move(end["x"] + 8, end["y"] + 20, steps=4)
    with page.expect_response("**/sortable*.js"):
        waiting[0].continue_()
    page.wait_for_function("window.Sortable?.get(document.getElementById('waiting'))")
    page.mouse.move(end["x"] + 8, end["y"] + 8, steps=10)
    expect(page.locator(".would")).to_contain_text("position 5 → 2")
    page.mouse.up()
    expect(shown(page)).to_have_text(list("aebcd"))
    assert len(waiting) == 1


def test_a_row_that_was_moved_stays_marked_for_a_while(page: Page) -> None:
    grip(page, "d").press("Alt+ArrowUp")
    expect(page.locator("#waiting tr.moved")).to_contain_text("d")
    page.wait_for_timeout(2500)  # a poll has come in between
    assert page.locator("#waiting tr.moved").count() == 1
    expect(page.locator("#waiting tr.moved")).to_have_count(0)


def test_a_row_carried_by_keys_is_put_back_by_escape_and_leaves_no_trace(page: Page, project: Project) -> None:
    grip(page, "d").press("ArrowUp")
    page.keyboard.press("ArrowUp")
    expect(page.locator(".would")).to_contain_text("position 4 → 2")
    assert accessibility_faults(page) == []
    page.keyboard.press("Escape")
    expect(shown(page)).to_have_text(list("abcde"))
    expect(page.locator("#waiting :is(.would, [data-would])")).to_have_count(0)
    expect(page.locator("#say")).to_have_text("d not moved")
    assert page.evaluate(FOCUSED) == "Move d"
    assert order(project) == "abcde"


def test_leaving_a_carried_row_puts_it_back(page: Page) -> None:
    grip(page, "d").press("ArrowUp")
    expect(page.locator(".would")).to_be_visible()
    page.keyboard.press("Tab")
    expect(shown(page)).to_have_text(list("abcde"))
    expect(page.locator("#waiting :is(.would, [data-would])")).to_have_count(0)
    expect(page.locator("#say")).to_have_text("d not moved")


def test_a_carried_row_is_put_down_by_enter(page: Page, project: Project) -> None:
    grip(page, "d").press("ArrowUp")
    page.keyboard.press("Enter")
    expect(page.get_by_text("d moved from position 4 to 3")).to_be_visible()
    assert order(project) == "abdce"
    assert page.evaluate(FOCUSED) == "Move d"


def test_the_list_is_not_refreshed_while_a_row_is_dragged(page: Page, project: Project, mia: User) -> None:
    take(page, "e", over="c")
    make_run(project, mia, "newer")
    services.set_priority(Run.objects.get(name="d"), mia, "manager", 90)
    page.wait_for_timeout(2600)  # longer than the poll's interval
    expect(shown(page)).to_have_text(list("abecd"))
    page.mouse.up()
    expect(shown(page)).to_have_text(["d", "a", "b", "e", "c", "newer"])


def test_of_two_windows_that_move_the_same_run_the_second_is_refused(
    page: Page, project: Project, live_server, new_page: Callable[..., Page], complaints: Complaints
) -> None:
    other = new_page()
    sign_in(other, live_server.url, "ann")
    other.goto(f"{live_server.url}/p/main/queue/")
    take(page, "c", over="a")
    expect(page.locator(".would")).to_contain_text("position 3 → 1")
    other.get_by_role("spinbutton", name="Priority of c", exact=True).fill("40")
    other.keyboard.press("Enter")
    expect(other.get_by_text("Priority of c set to 40")).to_be_visible()
    page.mouse.up()
    expect(page.get_by_text("c was changed by ann since you looked")).to_be_visible()
    expect(shown(page)).to_have_text(list("abdec"))
    expect(page.get_by_role("spinbutton", name="Priority of c", exact=True)).to_have_value("40")
    assert order(project) == "abdec"
    complaints.remove_failed_loads()


def test_undo_keeps_a_concurrent_change_of_another_user(
    page: Page, project: Project, mia: User, complaints: Complaints
) -> None:
    grip(page, "e").press("Alt+ArrowUp")
    expect(page.get_by_text("e moved from position 5 to 4")).to_be_visible()
    services.set_priority(Run.objects.get(name="e"), mia, "manager", 80)
    page.keyboard.press("Control+z")
    expect(page.get_by_text("e was changed")).to_be_visible()
    expect(shown(page)).to_have_text(list("eabcd"))
    complaints.remove_failed_loads()


def test_without_the_server_a_drop_shows_an_error_and_the_row_returns(
    page: Page, project: Project, complaints: Complaints
) -> None:
    take(page, "e", over="b")
    expect(page.locator(".would")).to_be_visible()
    page.context.set_offline(True)
    page.mouse.up()
    expect(page.get_by_text("Something went wrong")).to_be_visible()
    expect(shown(page)).to_have_text(list("abcde"))
    page.context.set_offline(False)
    grip(page, "e").press("Alt+ArrowUp")
    expect(shown(page)).to_have_text(list("abced"))
    complaints.remove_failed_loads()


def test_without_the_server_a_typed_priority_shows_an_error_and_is_reverted(page: Page, complaints: Complaints) -> None:
    page.context.set_offline(True)
    typed = page.get_by_role("spinbutton", name="Priority of b", exact=True)
    typed.fill("77")
    typed.press("Enter")
    expect(page.get_by_text("Something went wrong")).to_be_visible()
    expect(typed).to_have_value("50")
    page.context.set_offline(False)
    complaints.remove_failed_loads()


def test_letters_move_between_rows_only_while_the_list_has_the_focus(page: Page) -> None:
    page.keyboard.press("j")
    assert page.evaluate(FOCUSED) == "BODY"
    grip(page, "a").focus()
    page.keyboard.press("j")
    page.keyboard.press("j")
    assert page.evaluate(FOCUSED) == "Move c"
    page.keyboard.press("k")
    page.keyboard.press("x")
    expect(page.get_by_role("checkbox", name="Select b", exact=True)).to_be_checked()
    page.keyboard.press("Shift+J")
    expect(shown(page)).to_have_text(list("acbde"))
    assert page.evaluate(FOCUSED) == "Move b"


def test_the_menu_of_a_handle_is_worked_by_keys(page: Page) -> None:
    grip(page, "b").press("Enter")
    expect(page.get_by_role("menuitem", name="Why this run is waiting")).to_be_focused()
    assert accessibility_faults(page) == []
    page.keyboard.press("End")
    expect(page.get_by_role("menuitem", name="Stop")).to_be_focused()
    page.keyboard.press("Home")
    for _ in range(3):
        page.keyboard.press("ArrowDown")
    expect(page.get_by_role("menuitem", name="Move down")).to_be_focused()
    page.keyboard.press("Enter")
    expect(shown(page)).to_have_text(list("acbde"))
    assert page.evaluate(FOCUSED) == "Move b"


def test_the_menu_of_a_row_opens_by_its_button_a_right_click_or_a_key(page: Page, live_server, mia: User) -> None:
    menu = page.get_by_role("menu")
    more(page, "b").click()
    expect(menu).to_contain_text("Copy name")
    box = menu.bounding_box()
    services.set_priority(Run.objects.get(name="b"), mia, "manager", 90)
    expect(shown(page).first).to_have_text("b")
    expect(menu).to_be_visible()  # and it follows its row
    assert box != menu.bounding_box()
    page.keyboard.press("Escape")
    assert page.evaluate(FOCUSED) == "Actions for b"
    page.keyboard.press("m")
    page.get_by_role("menuitem", name="Set priority…").press("Enter")
    typed = page.get_by_role("spinbutton", name="Priority of b", exact=True)
    expect(typed).to_be_focused()
    typed.press("Escape")
    page.locator(f"#run-{Run.objects.get(name='d').pk} .why").click(button="right")
    expect(menu).to_contain_text("d")
    page.get_by_role("menuitem", name="Why this run is waiting").click()
    expect(page).to_have_url(f"{live_server.url}/p/main/runs/{Run.objects.get(name='d').uid}/why/")


def test_what_went_well_is_one_notice_that_counts_and_each_change_can_be_undone(page: Page, project: Project) -> None:
    notices = page.get_by_role("region", name="Notices").locator(".dw-toast")
    for name in "edc":
        grip(page, name).press("Alt+ArrowUp")
        expect(notices).to_contain_text(f"{name} moved")
    expect(notices).to_have_count(1)
    expect(notices).to_contain_text("3×")
    for _change in "cde":
        before = order(project)
        page.keyboard.press("Control+z")
        expect(shown(page)).not_to_have_text(list(before))
    assert order(project) == "abcde"
    expect(notices.get_by_role("button", name="Undo")).to_have_count(0)


def test_enter_in_the_dialog_for_a_place_moves_there(page: Page, project: Project) -> None:
    grip(page, "e").click()
    page.get_by_role("menuitem", name="Before…").click()
    place = page.get_by_label("Reference run")
    place.fill("b")
    expect(page.locator("#place [data-effect]")).to_contain_text("position 5 → 2")
    assert accessibility_faults(page) == []
    place.press("Enter")
    expect(shown(page)).to_have_text(list("aebcd"))
    assert page.evaluate(FOCUSED) == "Move e"
    assert order(project) == "aebcd"


def test_selected_runs_move_together_and_show_their_position(page: Page, project: Project) -> None:
    page.get_by_role("checkbox", name="Select e", exact=True).check()
    page.get_by_role("checkbox", name="Select c", exact=True).check()
    bar = page.get_by_role("group", name="Actions for selected runs")
    expect(bar).to_contain_text("2 selected")
    assert accessibility_faults(page) == []
    bar.get_by_role("button", name="To top").click()
    expect(page.get_by_text("2 runs moved to positions 1–2")).to_be_visible()
    assert order(project) == "ceabd"
    expect(page.get_by_role("checkbox", name="Select c", exact=True)).to_be_checked()
    page.keyboard.press("Control+z")
    expect(shown(page)).to_have_text(list("abcde"))


def test_after_a_stop_by_keyboard_the_focus_is_on_the_next_run(page: Page) -> None:
    more(page, "b").press("Enter")
    page.get_by_role("menuitem", name="Stop").press("Enter")
    page.get_by_role("button", name="Cancel run").press("Enter")
    expect(shown(page)).to_have_text(list("acde"))
    assert page.evaluate(FOCUSED) == "Move c"


def test_after_a_run_moves_off_the_page_the_focus_is_on_the_row_in_its_place(
    page: Page, live_server, project: Project, mia: User
) -> None:
    for number in range(45):
        make_run(project, mia, f"job-{number}")
    page.goto(f"{live_server.url}/p/main/queue/?page=2")
    expect(page.get_by_text("26–50 of 50")).to_be_visible()
    names = shown(page).all_text_contents()
    grip(page, names[1]).press("Enter")
    page.get_by_role("menuitem", name="To top").press("Enter")
    expect(page.get_by_text(f"{names[1]} moved from position 27 to 1")).to_be_visible()
    assert page.evaluate(FOCUSED) == f"Move {shown(page).all_text_contents()[1]}"


def test_refreshes_keep_the_focus_and_announce_no_runs_of_others(page: Page, project: Project, mia: User) -> None:
    grip(page, "d").focus()
    page.evaluate(
        "window.said = []; for (const place of document.querySelectorAll('[role=status], [aria-live]'))"
        " new MutationObserver(() => said.push(place.textContent)).observe(place, {childList: true, subtree: true})"
    )
    services.set_priority(Run.objects.get(name="c"), mia, "manager", 90)
    expect(shown(page).first).to_have_text("c")
    assert page.evaluate(FOCUSED) == "Move d"
    assert [text for text in page.evaluate("said") if text.strip()] == []


def test_escape_cancels_a_drag_wherever_the_pointer_moves_next(page: Page, project: Project) -> None:
    take(page, "e", over="b")
    expect(page.locator(".would")).to_be_visible()
    page.keyboard.press("Escape")
    place = grip(page, "c").bounding_box()
    assert place
    page.mouse.move(place["x"] + 8, place["y"] + 8, steps=8)
    page.mouse.up()
    page.wait_for_timeout(300)
    expect(shown(page)).to_have_text(list("abcde"))
    expect(page.locator("#waiting :is(.would, .carried, [data-would])")).to_have_count(0)
    assert order(project) == "abcde"


def test_an_impossible_position_shows_an_error_in_the_open_dialog(page: Page, project: Project) -> None:
    grip(page, "e").click()
    page.get_by_role("menuitem", name="After…").click()
    place = page.get_by_label("Reference run")
    place.press("Enter")
    expect(page.get_by_role("dialog")).to_be_visible()  # it asks for a name first
    place.fill("nobody")
    expect(page.locator("#place [data-effect]")).to_have_text("No waiting run named nobody in this queue.")
    place.press("Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_role("dialog")).to_be_hidden()
    assert page.evaluate(FOCUSED) == "Move e"
    assert order(project) == "abcde"


def test_the_current_rows_are_shown_after_a_refused_move(
    page: Page, five: dict[str, Run], project: Project, mia: User, complaints: Complaints
) -> None:
    services.stop(five["e"], mia, "manager")
    grip(page, "e").press("Alt+ArrowUp")
    expect(page.get_by_text("has already ended")).to_be_visible()
    expect(shown(page)).to_have_text(list("abcd"))
    assert page.evaluate(FOCUSED) == "Move d"
    complaints.remove_failed_loads()


@pytest.mark.parametrize("status", [403, 503])
def test_an_answer_without_the_list_does_not_replace_it(
    page: Page, project: Project, complaints: Complaints, status: int
) -> None:
    """A proxy that is in the way, a sign-in in another window that made this page's token worthless."""
    page.route("**/change/*", lambda route: route.fulfill(status=status, body="<html><body>down</body></html>"))
    take(page, "e", over="b")
    expect(page.locator(".would")).to_be_visible()
    page.mouse.up()
    expect(page.get_by_text(f"Something went wrong ({status})")).to_be_visible()
    assert shown(page).count() == 5  # not even until the next poll
    expect(shown(page)).to_have_text(list("abcde"))
    assert order(project) == "abcde"
    complaints.remove_failed_loads()


def test_a_csrf_token_of_another_sign_in_shows_a_message_and_changes_nothing(
    page: Page, project: Project, complaints: Complaints
) -> None:
    page.evaluate("document.body.setAttribute('hx-headers:inherited', '{\"X-CSRFToken\": \"of another sign-in\"}')")
    grip(page, "e").press("Alt+ArrowUp")
    expect(page.get_by_text("Something went wrong (403). Reload the page and try again.")).to_be_visible()
    assert shown(page).all_text_contents() == list("abcde")
    expect(shown(page)).to_have_text(list("abcde"))
    complaints.remove_failed_loads()


def test_a_priority_typed_on_the_runs_own_page_is_refused_when_it_is_stale(
    page: Page, live_server, five: dict[str, Run], mia: User, complaints: Complaints
) -> None:
    page.goto(f"{live_server.url}/p/main/runs/b/")
    typed = page.get_by_label("Priority", exact=True)
    typed.fill("77")
    services.set_priority(five["b"], mia, "manager", 20)
    page.wait_for_timeout(2600)  # a poll has come in between
    expect(typed).to_have_value("77")
    typed.press("Enter")
    expect(page.get_by_text("b was changed by mia since you looked")).to_be_visible()
    expect(typed).to_have_value("20")
    typed.fill("30")
    typed.press("Enter")
    page.get_by_role("button", name="Undo").click()
    expect(typed).to_have_value("20")
    complaints.remove_failed_loads()


@pytest.mark.parametrize("leave", ["Escape", "Tab"])
def test_an_edited_and_abandoned_priority_shows_the_current_value(
    page: Page, five: dict[str, Run], mia: User, leave: str
) -> None:
    typed = page.get_by_role("spinbutton", name="Priority of e", exact=True)
    typed.fill("77")
    services.set_priority(five["e"], mia, "manager", 20)
    services.set_priority(five["d"], mia, "manager", 60)
    expect(shown(page).first).to_have_text("d")  # a poll has come in between
    expect(typed).to_have_value("77")
    if leave == "Tab":
        typed.fill("50")
    typed.press(leave)
    expect(typed).to_have_value("20")


def test_columns_are_chosen_in_a_menu_and_rows_without_priorities_still_move_and_get_one(
    page: Page, live_server, project: Project
) -> None:
    queue = f"{live_server.url}/p/main/queue/"
    heads = page.locator(".dw-queue thead th.num")

    def choose(*names: str) -> None:
        page.get_by_text("Columns", exact=True).click()
        for name in names:
            page.get_by_role("checkbox", name=name, exact=True).click()
        page.get_by_role("button", name="Show").click()

    choose("Submitted", "Priority", "Wait reason", "Waiting")
    expect(heads).to_have_text(["Starts", "Submitted"])
    expect(page).to_have_url(f"{queue}?columns=name&columns=needs&columns=starts&columns=submitted")
    take(page, "e", over="b")
    expect(page.locator(".would")).to_contain_text("position 5 → 2")
    page.mouse.up()
    expect(shown(page)).to_have_text(list("aebcd"))
    more(page, "d").click()
    page.get_by_role("menuitem", name="Set priority").click()
    expect(page.get_by_label("Priority of selected runs")).to_be_focused()
    page.keyboard.type("70")
    page.keyboard.press("Enter")
    expect(shown(page)).to_have_text(list("daebc"))
    choose("Submitted", "Priority", "Wait reason", "Waiting")
    expect(heads).to_have_text(["Waiting", "Starts"])
    expect(page).to_have_url(f"{queue}?")  # what is usual is not in it


def test_the_palette_goes_to_runs_and_pages_and_changes_runs(page: Page, live_server, project: Project) -> None:
    palette = page.get_by_role("dialog", name="Command palette")
    typed = page.get_by_role("combobox", name="Go to a page or run")
    option = palette.get_by_role("option")
    page.keyboard.press("Control+k")
    expect(option.first).to_have_text("Queue")
    assert accessibility_faults(page) == []
    typed.fill("priority b 70")
    expect(option).to_contain_text(["b → 70"])
    page.keyboard.press("Enter")
    expect(palette).to_be_hidden()
    expect(shown(page)).to_have_text(list("bacde"))
    page.keyboard.press("Control+k")
    typed.fill("stop c")
    expect(option).to_have_text([re.compile("^c")])
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Cancel run").click()
    expect(shown(page)).to_have_text(list("bade"))
    page.keyboard.press("Control+k")
    typed.fill("e")
    palette.get_by_role("option", name=re.compile("^e")).click()
    expect(page).to_have_url(f"{live_server.url}/p/main/runs/{Run.objects.get(name='e').uid}/")


def test_keys_lead_to_pages_to_the_search_and_to_the_list_of_keys(page: Page, live_server) -> None:
    page.keyboard.press("/")
    search = page.get_by_role("searchbox", name="Search waiting runs by name")
    expect(search).to_be_focused()
    page.keyboard.type("?g")
    expect(search).to_have_value("?g")
    search.fill("")
    search.blur()
    page.keyboard.press("?")
    keys = page.get_by_role("dialog", name="Keyboard shortcuts")
    expect(keys).to_contain_text("Undo the last change")
    assert accessibility_faults(page) == []
    keys.get_by_label("Keys without Ctrl work on every page").uncheck()
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    expect(search).not_to_be_focused()
    page.evaluate("localStorage.clear()")
    page.keyboard.press("g")
    page.keyboard.press("r")
    expect(page).to_have_url(f"{live_server.url}/p/main/runs/")


def test_a_sweep_is_carried_as_one_row_and_opens_in_place(page: Page, project: Project, mia: User) -> None:
    make_sweep(project, mia, 300)
    page.reload()
    expect(shown(page)).to_have_text(["a", "b", "c", "d", "e", "lr"])
    grip(page, "lr").focus()
    for _step in range(5):
        page.keyboard.press("ArrowUp")
    expect(page.locator(".would")).to_contain_text("position 6 → 1")
    page.keyboard.press("Enter")
    expect(shown(page)).to_have_text(["lr", "a", "b", "c", "d", "e"])
    expect(page.locator("#waiting tr").first).to_have_attribute("id", re.compile(r"run-s\d+m\d+"))
    assert order(project).startswith("lr-0lr-1")
    take(page, "a", over="lr")
    page.mouse.up()
    expect(shown(page)).to_have_text(["a", "lr", "b", "c", "d", "e"])
    more(page, "lr").click()
    link = page.get_by_role("menuitem", name="Why this run is waiting")
    assert str(link.get_attribute("href")).endswith("/why/")
    page.get_by_role("menuitem", name="Stop").click()
    expect(page.locator("dialog[open]")).to_contain_text("100 active runs are stopped, 200 never start.")
    page.keyboard.press("Escape")
    page.get_by_role("link", name="Show 100 runs").click()
    expect(shown(page).nth(1)).to_have_text("lr-0")
    expect(shown(page)).to_have_count(25)
    assert accessibility_faults(page) == []
    page.get_by_role("link", name="Fold lr").click()
    expect(shown(page)).to_have_text(["a", "lr", "b", "c", "d", "e"])
