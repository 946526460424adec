"""Forms on pages, read as a browser reads them."""

from __future__ import annotations

from html.parser import HTMLParser

from django.test import Client


class _Fields(HTMLParser):
    """The values that the inputs and choices of a page send; texts are not read."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}
        self._select = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "select":
            self._select = given.get("name", "")
        elif tag == "option" and "selected" in given:
            self.found[self._select] = given.get("value", "")
        elif tag != "input" or "name" not in given:
            return
        elif given.get("type") not in ("checkbox", "radio") or "checked" in given:
            self.found[given["name"]] = given.get("value", "on" if given.get("type") == "checkbox" else "")


def filled(client: Client, address: str) -> dict[str, str]:
    """What the forms of this page send if nothing is typed."""
    fields = _Fields()
    fields.feed(client.get(address).content.decode())
    return fields.found
