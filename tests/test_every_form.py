"""Every form of every page can be sent as it was served, and what its answer shows and asks for works too."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterator
from html import unescape
from typing import Any
from urllib.parse import urljoin, urlsplit

import pytest
from django.db import transaction
from django.test import Client
from django.urls import get_resolver, resolve

from dstackweb.accounts import services
from dstackweb.accounts.models import Project, User
from tests.forms import SUBMITS, Form, forms_of
from tests.test_every_address import client, names, pages, query

__all__ = ["client", "names"]
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.slow]
REFUSED = {400, 403, 404, 405, 413}
LINKS = re.compile(r'\shref="([^"#]+)"')
OF_THE_PAGE = re.compile(r'\s(?:hx-get="|href="(?=\?))([^"]+)"')
"""What a page asks for by itself, and links that are relative to its address."""


def is_html(answer: Any) -> bool:
    return not answer.streaming and answer.headers.get("Content-Type", "").startswith("text/html")


def named(answer: Any, pattern: re.Pattern[str]) -> Iterator[str]:
    """The addresses of this site that a page names."""
    for written in pattern.findall(answer.content.decode()):
        address = urljoin(answer.request["PATH_INFO"], unescape(written))
        if address.startswith("/") and not address.startswith(("//", "/static/", "/admin/", "/api/")):
            yield address


def served(client: Client, start: list[str]) -> Iterator[Any]:
    """A page of each view that a reader comes to from these addresses."""
    waiting, known, views = deque(start), set(), set()
    while waiting:
        address = waiting.popleft()
        view = resolve(urlsplit(address).path).view_name
        if address in known or view in views:
            continue
        known.add(address)
        answer = client.get(address)
        if answer.status_code == 200:
            views.add(view)
            if is_html(answer):
                waiting += named(answer, LINKS)
                yield answer


def buttons(form: Form) -> set[str]:
    """What names the buttons of a form to press them, one of those that each row has; nothing where there is none."""
    pressed = [control for control in form.controls if control.kind in SUBMITS and control.fixed != "disabled"]
    words = Counter(word for one in pressed for word in {one.label, f"{one.name}={one.value}" if one.name else ""})
    by_kind = {re.sub(r"\d+", "0", word): word for word, count in words.items() if word and count == 1}
    return set(by_kind.values()) or {""}


def faults(form: Form, button: str, scripts: bool) -> set[str]:
    """Send this form, and say what does not work. It leaves nothing behind."""
    client, cookies, found = form.client, form.client.cookies.copy(), set()
    with transaction.atomic():
        answer = form.send(button=button, scripts=scripts)
        if answer.status_code in REFUSED or answer.status_code >= 500:
            found.add(f"{form} by {button!r}: {answer.status_code}")
        elif is_html(answer):
            asked = set(named(answer, OF_THE_PAGE))
            for other in forms_of(client, answer):
                asked |= set(other.values.get("next", [])) if other.attrs.get("action") == "/language/" else set()
            codes = {address: client.get(address).status_code for address in asked}
            found |= {f"{address} after {form}: {code}" for address, code in codes.items() if code not in (200, 302)}
        transaction.set_rollback(True)
    client.cookies = cookies
    return found


def test_every_form_works_as_it_is_served(client: Client, names: dict[str, str]) -> None:
    root = User.objects.get(username="root")
    invite = services.invite(Project.objects.get(name="main"), root, "member")[1]
    templates = [one for one in pages(get_resolver().url_patterns) if not re.search(r"<|\{token\}|^/api/", one)]
    inside = [address + query(address) for address in (template.format_map(names) for template in templates)]
    outside = ["/login/", f"/invite/{invite}/", f"/login/{services.make_login_link(root)}/"]
    sent, wrong = set(), set()
    for reader, addresses in ((client, inside), (Client(), outside)):
        reader.raise_request_exception = False
        for page in served(reader, addresses):
            for form in forms_of(reader, page):
                if form.attrs.get("method", "").lower() != "post":  # those of searches
                    assert "hx-post" not in form.attrs, f"without scripts, {form} asks for a page"
                    continue
                view = resolve(urlsplit(urljoin(form.page, form.attrs.get("action") or form.page)).path).view_name
                by_htmx = "hx-post" in form.attrs or any("hx-post" in control.attrs for control in form.controls)
                for button in buttons(form):
                    key = (view, *sorted(form.values), re.sub(r"\d+", "0", button))
                    if key not in sent:
                        sent.add(key)
                        for scripts in {True, not by_htmx}:
                            wrong |= faults(form, button, scripts)
    assert wrong == set()
    assert len(sent) > 60
