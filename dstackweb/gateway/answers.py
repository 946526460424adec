"""The gateway's own answers, where it can't pass on what a job says: a page for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any

from aiohttp import web
from django.conf import settings
from django.utils import translation
from django.utils.translation import gettext as _

from dstackweb.gateway.headers import PROBLEM
from dstackweb.runs.service_codes import GatewayProblem
from dstackweb.wording import gateway

STATUSES = {
    GatewayProblem.NO_RUN: 404,
    GatewayProblem.SIGN_IN: 401,
    GatewayProblem.BAD_TOKEN: 401,
    GatewayProblem.TOO_MANY_FAILURES: 429,
    GatewayProblem.NO_ACCESS: 403,
    GatewayProblem.TOKENS_NOT_TAKEN: 403,
    GatewayProblem.OTHER_ORIGIN: 403,
    GatewayProblem.NOT_STARTED: 503,
    GatewayProblem.ENDING: 503,
    GatewayProblem.ENDED: 410,
    GatewayProblem.DISCONNECTED: 503,
    GatewayProblem.NOT_LISTENING: 503,
    GatewayProblem.OTHER_USERS_PORT: 502,
    GatewayProblem.UNREACHABLE: 502,
    GatewayProblem.BUSY: 503,
    GatewayProblem.NO_ANSWER: 502,
}
assert set(STATUSES) == set(GatewayProblem)
WAIT_S = {503: 5, 429: 600}
"""After how many seconds to try again, by status."""
PAGE = """<!doctype html><html lang="{language}"><meta charset="utf-8">{refresh}<title>{title}</title>
<meta name="viewport" content="width=device-width">
<body style="font: 16px/1.5 system-ui; margin: 4rem auto; max-width: 36rem; padding: 0 1rem; color-scheme: light dark">
<h1 style="font-size: 1.25rem">{title}</h1><p>{text}{again}<p><a href="{url}">dstackweb</a></html>"""


class Denied(Exception):
    """A request that the gateway answers itself. `data` has the run's name, status and port, where they are known."""

    def __init__(self, problem: GatewayProblem, **data: Any) -> None:
        super().__init__(problem.value)
        self.problem, self.data = problem, data


def answer(denied: Denied, headers: Mapping[str, str], *, repeats: bool = False) -> web.Response:
    """The answer to a request with these headers; `repeats`: a page may load itself again."""
    status, problem = STATUSES[denied.problem], denied.problem
    own = {PROBLEM: problem.value, "Cache-Control": "no-store"}
    if status in WAIT_S:
        own["Retry-After"] = str(WAIT_S[status])
    if status == 401:
        own["WWW-Authenticate"] = "Bearer"
    with translation.override(_language(headers.get("Accept-Language", ""))):
        label = gateway.problem(problem, denied.data)
        if "text/html" not in headers.get("Accept", ""):
            body = {"detail": str(label.text), "problem": problem.value}
            return web.Response(
                status=status, text=json.dumps(body, ensure_ascii=False), content_type="application/json", headers=own
            )
        reloads = repeats and status == 503
        text = PAGE.format(
            language=translation.get_language(), title=escape(label.label), text=escape(str(label.text)),
            refresh=f'<meta http-equiv="refresh" content="{WAIT_S[status]}">' if reloads else "",
            again=escape(" " + _("This page reloads by itself.")) if reloads else "",
            url=escape(settings.DSTACKWEB_API_URL),
        )  # fmt: skip
    return web.Response(status=status, text=text, content_type="text/html", headers=own)


def _language(accepted: str) -> str:
    """The first of the accepted languages that there are texts in."""
    for part in accepted.split(",")[:20]:
        try:
            return translation.get_supported_language_variant(part.partition(";")[0].strip()[:40])
        except LookupError:
            continue
    return settings.LANGUAGE_CODE
