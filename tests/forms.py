"""Forms of served pages, filled in and sent as a browser does it.

A test that saves something through a page starts with the HTML that the page served: a field that the page lacks, a
choice that is not offered and a token that is missing then fail the test, as they fail the reader. `send` raises
LookupError for what no browser could send; a test of such a request posts its body by hand, and says so in its name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any
from urllib.parse import urljoin

from django.test import Client
from django.test.client import MULTIPART_CONTENT

NO_TEXT = {"hidden", "checkbox", "radio", "submit", "button", "reset", "image"}
SUBMITS = {"submit", "image"}


@dataclass
class Control:
    """An input, a select, a textarea or a button with a name."""

    name: str
    kind: str  # the type of an input, else `select`, `textarea` or `submit`
    value: str = ""
    label: str = ""  # the text of a button
    checked: bool = False
    multiple: bool = False
    fixed: str = ""  # `disabled`, or `readonly`
    options: list[tuple[str, bool]] = field(default_factory=list)  # values that a select offers; True: selected
    attrs: dict[str, str] = field(default_factory=dict)

    @property
    def sent(self) -> list[str]:
        if self.kind == "select":
            chosen = [value for value, selected in self.options if selected]
            if not chosen and self.options and not self.multiple:
                chosen = [self.options[0][0]]
            return chosen
        if self.kind in ("checkbox", "radio"):
            return [self.value] if self.checked else []
        return [self.value]


@dataclass
class Form:
    """A form that a page has shown to this client. Sending it leaves it as it was served."""

    client: Client
    page: str  # the address that it was served at
    attrs: dict[str, str]
    controls: list[Control] = field(default_factory=list)

    def __str__(self) -> str:
        names = sorted({control.name for control in self.controls if control.name})
        return f"form to {self.attrs.get('action') or self.page} with {', '.join(names)}"

    @property
    def values(self) -> dict[str, list[str]]:
        """What is sent if nothing is changed, without a button."""
        return self.filled({})

    def filled(self, changes: dict[str, Any]) -> dict[str, list[str]]:
        """The body with these changes and without a button, as scripts of a page read it from the form."""
        sent: dict[str, list[str]] = {}
        for name in {control.name: None for control in self.controls if control.name}:
            group = [one for one in self.controls if one.name == name and one.fixed != "disabled"]
            group = [one for one in group if one.kind not in SUBMITS and one.kind not in ("button", "reset", "file")]
            values = [value for one in group for value in one.sent]
            if name in changes:
                values = self._changed(name, group, changes[name])
            if values:
                # Browsers send lines with ends of their own.
                sent[name] = [value.replace("\r\n", "\n").replace("\n", "\r\n") for value in values]
        return sent

    def _changed(self, name: str, group: list[Control], wanted: Any) -> list[str]:
        """The values of controls of one name after a person has changed them."""
        if not group or any(one.fixed for one in group):
            raise LookupError(f"nobody can change {name!r} in this {self}")
        kinds = {one.kind for one in group}
        if "hidden" in kinds and len(kinds) == 1:
            raise LookupError(f"{name!r} is hidden in this {self}")
        if isinstance(wanted, bool):
            if kinds != {"checkbox"} or len(group) != 1:
                raise LookupError(f"{name!r} is not one checkbox in this {self}")
            return [group[0].value] if wanted else []
        several = isinstance(wanted, (list, tuple, set))
        values = [str(value) for value in (wanted if several else [wanted])]
        if kinds & {"select", "checkbox", "radio"}:
            offered = {value for one in group for value, _selected in one.options or [(one.value, False)]}
            for one in group:
                offered |= self._searched(one)
            if unknown := set(values) - offered:
                raise LookupError(f"{name!r} offers {sorted(offered)} and not {sorted(unknown)} in this {self}")
            if len(values) != 1 and (kinds == {"radio"} or (kinds == {"select"} and not group[0].multiple)):
                raise LookupError(f"{name!r} takes one choice in this {self}")
        elif len(values) != len(group):
            raise LookupError(f"{name!r} has {len(group)} fields in this {self}")
        return values

    def _searched(self, control: Control) -> set[str]:
        """What the admin site's fields for searching offer before anything is typed."""
        address = control.attrs.get("data-ajax--url")
        if not address:
            return set()
        wanted = {
            name: control.attrs[f"data-{name.replace('_', '-')}"] for name in ("app_label", "model_name", "field_name")
        }
        return {str(row["id"]) for row in self.client.get(address, wanted).json()["results"]}

    def _button(self, wanted: str) -> Control | None:
        """The button that is pressed: by its name, `name=value` or text. Without any, the only one there is to press.

        Of the buttons of an admin's page this is *Save*.
        """
        buttons = [one for one in self.controls if one.kind in SUBMITS and one.fixed != "disabled"]
        if wanted:
            fitting = [one for one in buttons if wanted in (one.name, f"{one.name}={one.value}", one.label)]
        else:
            fitting = [one for one in buttons if one.name == "_save"] or buttons
        if len(fitting) == 1 or (not wanted and not buttons):
            return fitting[0] if fitting else None
        known = ", ".join(f"{one.name}={one.value} ({one.label})" for one in buttons)
        raise LookupError(
            f"press one of the buttons {known or '(none)'}: {wanted!r} names {len(fitting)} of this {self}"
        )

    def send(self, changes: dict[str, Any] | None = None, button: str = "", **request: Any) -> Any:
        """Change these fields, press the button and return the answer; `request` goes to the test client.

        A value is a text or a number, True or False for a checkbox, and a list where several can be chosen or a name
        has several fields. A form or button with `hx-post` is sent as htmx sends it.
        """
        changes = changes or {}
        pressed = self._button(button)
        if unknown := set(changes) - {control.name for control in self.controls}:
            raise LookupError(f"no field {', '.join(sorted(unknown))} in this {self}")
        body: dict[str, list[str]] = self.filled(changes)
        if pressed is not None and pressed.name:
            body.setdefault(pressed.name, []).append(pressed.value)
        own = pressed.attrs if pressed is not None else {}
        address = own.get("formaction") or self.attrs.get("action") or self.page
        headers = dict(request.pop("headers", {}))
        if by_htmx := own.get("hx-post") or self.attrs.get("hx-post"):
            address = by_htmx
            cookie = self.client.cookies.get("csrftoken")
            headers = {"HX-Request": "true", "X-CSRFToken": cookie.value if cookie else "", **headers}
        elif self.attrs.get("method", "get").lower() != "post":
            raise LookupError(f"this {self} is not posted")
        strict, self.client.handler.enforce_csrf_checks = self.client.handler.enforce_csrf_checks, True
        try:
            return self.client.post(
                urljoin(self.page, address), body, content_type=MULTIPART_CONTENT, headers=headers, **request
            )
        finally:
            self.client.handler.enforce_csrf_checks = strict


class _Reader(HTMLParser):
    """The forms of a page. A control belongs to the form around it, or to the one that its attribute `form` names."""

    def __init__(self, client: Client, page: str) -> None:
        super().__init__()
        self.client, self.page = client, page
        self.forms: list[Form] = []
        self.controls: list[tuple[Form | str, Control]] = []
        self._form: Form | None = None
        self._disabled = 0
        self._fieldsets: list[bool] = []
        self._text: Control | None = None  # the textarea or button whose text is being read
        self._select: Control | None = None
        self._option: list[str] | None = None  # the text of an option without a value
        self._data: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "form":
            self._form = Form(self.client, self.page, given)
            self.forms.append(self._form)
        elif tag == "fieldset":
            self._fieldsets.append("disabled" in given)
        elif tag == "option" and self._select is not None:
            self._close_option()
            self._select.options.append((given.get("value", ""), "selected" in given))
            self._option = None if "value" in given else []
            if "disabled" in given:
                self._select.options.pop()
                self._option = None
        elif tag in ("input", "select", "textarea", "button"):
            self._add(tag, given)

    def _add(self, tag: str, given: dict[str, str]) -> None:
        kind = given.get("type", "text" if tag == "input" else "submit").lower() if tag in ("input", "button") else tag
        standard = "on" if kind in ("checkbox", "radio") else ""
        fixed = "disabled" if "disabled" in given or any(self._fieldsets) else "readonly" if "readonly" in given else ""
        control = Control(
            given.get("name", ""), kind, given.get("value", standard), given.get("value", "") if tag == "input" else "",
            "checked" in given, "multiple" in given, fixed, attrs=given,
        )  # fmt: skip
        owner = given.get("form") or self._form
        if owner is not None:
            self.controls.append((owner, control))
        if tag == "select":
            self._select = control
        elif tag in ("textarea", "button"):
            self._text, self._data = control, []

    def handle_data(self, data: str) -> None:
        if self._option is not None:
            self._option.append(data)
        if self._text is not None:
            self._data.append(data)

    def _close_option(self) -> None:
        if self._option is not None and self._select is not None:
            _value, selected = self._select.options.pop()
            self._select.options.append((" ".join("".join(self._option).split()), selected))
            self._option = None

    def handle_endtag(self, tag: str) -> None:
        if tag == "form":
            self._form = None
        elif tag == "fieldset" and self._fieldsets:
            self._fieldsets.pop()
        elif tag in ("option", "select"):
            self._close_option()
            self._select = None if tag == "select" else self._select
        elif self._text is not None and tag == "textarea":
            text = "".join(self._data)
            self._text.value = text.removeprefix("\n")
            self._text = None
        elif self._text is not None and tag == "button":
            self._text.label = " ".join("".join(self._data).split())
            self._text = None

    def close(self) -> None:
        super().close()
        by_id = {form.attrs["id"]: form for form in self.forms if "id" in form.attrs}
        for owner, control in self.controls:
            form = by_id.get(owner) if isinstance(owner, str) else owner
            if form is not None:
                form.controls.append(control)


def forms_of(client: Client, answer: Any) -> list[Form]:
    """All forms of a page that was served, those of searches too."""
    query = answer.request.get("QUERY_STRING", "")
    reader = _Reader(client, answer.request["PATH_INFO"] + (f"?{query}" if query else ""))
    reader.feed(answer.content.decode())
    reader.close()
    return reader.forms


def open_form(client: Client, page: Any, to: str = "", having: str = "") -> Form:
    """The form of a page, an address or the answer that served it, which is posted.

    Where there are several, `to` is the end of the address that it is sent to, and `having` a field or a button of it.
    """
    if isinstance(page, str):
        page = client.get(page)
        assert page.status_code == 200, f"{page.request['PATH_INFO']} answers {page.status_code}"
    fitting = []
    for form in forms_of(client, page):
        targets = [form.attrs.get("hx-post") or form.attrs.get("action") or form.page]
        targets += [one.attrs.get("hx-post") or one.attrs.get("formaction", "") for one in form.controls]
        is_posted = form.attrs.get("method", "").lower() == "post" or "hx-post" in form.attrs
        names = {one.name for one in form.controls} | {one.label for one in form.controls}
        if not is_posted or (having and having not in names):
            continue
        if to and not any(target.endswith(to) for target in targets if target):
            continue
        # The menu of each page has forms, too.
        if not to and form.attrs.get("action") in ("/logout/", "/language/"):
            continue
        fitting.append(form)
    if len(fitting) != 1:
        raise LookupError(f"{len(fitting)} forms to {to!r} having {having!r}: {'; '.join(map(str, fitting))}")
    return fitting[0]


def submit(
    client: Client,
    page: Any,
    changes: dict[str, Any] | None = None,
    *,
    to: str = "",
    having: str = "",
    button: str = "",
    **request: Any,
) -> Any:
    """Open a page, change these fields of its form and send it: the answer."""
    if not to and not having and changes:
        having = next(iter(changes))
    return open_form(client, page, to, having).send(changes, button, **request)
