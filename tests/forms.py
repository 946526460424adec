"""Forms of served pages, filled in and sent as a browser does it.

A test that saves something through a page starts with the HTML that the page served: a field that the page lacks, a
choice that is not offered and a token that is missing then fail the test, as they fail the reader. `send` raises
LookupError for what no browser could send; a test of such a request posts its body by hand, and says so in its name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from typing import Any
from urllib.parse import urljoin

from django.test import Client
from django.test.client import MULTIPART_CONTENT

SUBMITS = {"submit", "image"}
MULTIPART = "multipart/form-data"


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
    headers: dict[str, str] = field(default_factory=dict)  # what htmx sends with each request of this page

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
            raise LookupError(f"{name!r} cannot be changed in this {self}")
        kinds = {one.kind for one in group}
        if "hidden" in kinds and len(kinds) == 1:
            raise LookupError(f"{name!r} is hidden in this {self}")
        if isinstance(wanted, bool):
            # A hidden field beside it says that it was there to be ticked.
            if kinds not in ({"checkbox"}, {"checkbox", "hidden"}) or [one.kind for one in group].count("checkbox") > 1:
                raise LookupError(f"{name!r} is not one checkbox in this {self}")
            return [one.value for one in group if wanted or one.kind == "hidden"]
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

    def send(
        self, changes: dict[str, Any] | None = None, button: str = "", *, scripts: bool = True, **request: Any
    ) -> Any:
        """Change these fields, press the button and return the answer; `request` goes to the test client.

        A value is a text or a number, True or False for a checkbox, an open file, and a list where several can be
        chosen or a name has several fields. With `scripts` a form or button with `hx-post` is sent as htmx sends it.
        """
        changes = changes or {}
        pressed = self._button(button)
        if unknown := set(changes) - {control.name for control in self.controls}:
            raise LookupError(f"no field {', '.join(sorted(unknown))} in this {self}")
        files = {name: value for name, value in changes.items() if hasattr(value, "read")}
        for name in files:
            kinds = {(control.kind, control.fixed) for control in self.controls if control.name == name}
            if kinds != {("file", "")} or self.attrs.get("enctype") != MULTIPART:
                raise LookupError(f"{name!r} takes no file in this {self}")
        body: dict[str, Any] = self.filled({name: value for name, value in changes.items() if name not in files})
        if pressed is not None and pressed.name:
            body.setdefault(pressed.name, []).append(pressed.value)
        own = pressed.attrs if pressed is not None else {}
        address = own.get("formaction") or self.attrs.get("action") or self.page
        if by_htmx := scripts and (own.get("hx-post") or self.attrs.get("hx-post")):
            headers = {"HX-Request": "true", **self.headers, **request.pop("headers", {})}
            return _post(self.client, urljoin(self.page, by_htmx), body | files, headers=headers, **request)
        if self.attrs.get("method", "get").lower() != "post":
            raise LookupError(f"this {self} is not posted")
        return _post(self.client, urljoin(self.page, address), body | files, **request)

    def with_answer(self, answer: Any) -> Form:
        """This form after htmx has put an answer into it, whose controls replace those with the same `id`."""
        reader = _Reader(self.client, self.page)
        reader.feed(f"<form>{answer.content.decode()}</form>")
        reader.close()
        new = reader.forms[0].controls
        ids = {control.attrs.get("id") for control in new} - {None}
        return replace(self, controls=[one for one in self.controls if one.attrs.get("id") not in ids] + new)


class _Reader(HTMLParser):
    """The forms of a page. A control belongs to the form around it, or to the one that its attribute `form` names."""

    def __init__(self, client: Client, page: str) -> None:
        super().__init__()
        self.client, self.page = client, page
        self.forms: list[Form] = []
        self.headers: dict[str, str] = {}
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
        self.headers |= json.loads(given.get("hx-headers:inherited", "{}"))
        if tag == "form":
            self._form = Form(self.client, self.page, given, headers=self.headers)
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
    return _read(client, answer).forms


def _read(client: Client, answer: Any) -> _Reader:
    query = answer.request.get("QUERY_STRING", "")
    reader = _Reader(client, answer.request["PATH_INFO"] + (f"?{query}" if query else ""))
    reader.feed(answer.content.decode())
    reader.close()
    return reader


def send_by_script(
    client: Client, page: Any, address: str, values: dict[str, Any], headers: dict[str, str] | None = None
) -> Any:
    """Post values that a script of a page puts together, not a form: as `htmx.ajax` does."""
    if isinstance(page, str):
        page = client.get(page)
    headers = {"HX-Request": "true", **_read(client, page).headers, **(headers or {})}
    return _post(client, address, values, headers=headers)


def _post(client: Client, address: str, body: dict[str, Any], **request: Any) -> Any:
    """Post it with the check of tokens, which the test client leaves out."""
    strict, client.handler.enforce_csrf_checks = client.handler.enforce_csrf_checks, True
    try:
        return client.post(address, body, content_type=MULTIPART_CONTENT, **request)
    finally:
        client.handler.enforce_csrf_checks = strict


def open_form(client: Client, page: Any, to: str = "", having: str = "") -> Form:
    """The form of a page, an address or the answer that served it, which is posted.

    Where there are several, `to` is the end of the address that it is sent to, and `having` a field or a button of it.
    """
    if isinstance(page, str):
        page = client.get(page)
        assert page.status_code == 200, f"{page.request['PATH_INFO']} answers {page.status_code}"
    return _only(forms_of(client, page), to, having)


def body_of(html: str, changes: dict[str, Any] | None = None) -> dict[str, list[str]]:
    """Return the body of a form after these changes, for pages of a server that runs apart from the test."""
    reader = _Reader(Client(), "")
    reader.feed(html)
    reader.close()
    return _only(reader.forms, having=next(iter(changes or {}), "")).filled(changes or {})


def _only(forms: list[Form], to: str = "", having: str = "") -> Form:
    fitting = []
    for form in forms:
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
    # A list that is laid out twice, for wide and for narrow screens, has each form twice.
    fitting = [
        form
        for form in fitting
        if form is fitting[0] or form.values != fitting[0].values or form.attrs != fitting[0].attrs
    ]
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
    scripts: bool = True,
    **request: Any,
) -> Any:
    """Open a page, change these fields of its form and send it: the answer."""
    if not to and not having and changes:
        having = next(iter(changes))
    return open_form(client, page, to, having).send(changes, button, scripts=scripts, **request)
