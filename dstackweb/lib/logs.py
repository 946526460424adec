"""Lines of the server's logs, as text or JSON, each with the id of the request that caused it.

A request has the id that its client or proxy sent as X-Request-ID, or a new one. The answer says it, and tasks that the
request enqueued carry it on.
"""

from __future__ import annotations

import datetime as dt
import json
import logging
import re
import secrets
import textwrap
import time
from contextvars import ContextVar
from typing import Any

from dstackweb.lib.text import in_json, seen

SELDOM_S = 60.0
HEADER = "X-Request-ID"
request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Of the request, or of the task that a request caused, that this thread works on; empty for none."""

_LINK = re.compile(r"(/(?:invite|login|password/[^/\s\"'?#]+)/)[^/\s\"'?#]{16,}")
"""The address of an invite, a sign-in link or a link for a new password, which lets anyone in who has it."""
_VALID = re.compile(r"[A-Za-z0-9._:=+/@-]{1,64}")


def take(sent: str | None) -> str:
    """The id of a new request: the one that was sent, if it is short and plain. This thread works on it from now on."""
    chosen = sent if sent and _VALID.fullmatch(sent) else secrets.token_hex(8)
    request_id.set(chosen)
    return chosen


def follow(sender: Any, task: dict[str, Any], **_signal: Any) -> None:
    """Before a worker runs a task: it works on the request that enqueued it, if one did."""
    request_id.set(task.get("group") or "")


def without_links(line: str) -> str:
    """A line without the tokens of such links: Django logs the addresses of refused requests."""
    return _LINK.sub(r"\1***", line)


class TextFormatter(logging.Formatter):
    """One line for people; the request's id is its end.

    Further lines of a message are indented: they can't look like lines of their own. Characters that can't be seen, or
    that a terminal would act on, show as numbers.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        return without_links(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = seen(super().formatMessage(record)).replace("\n", "\n    ")
        cause = request_id.get()
        return f"{line} [{cause}]" if cause else line

    def formatException(self, ei: Any) -> str:
        return textwrap.indent(seen(super().formatException(ei)), "    ")


class Seldom:
    """A warning of what anyone can cause any number of times: a line a minute, with how often it was until then."""

    def __init__(self, log: logging.Logger, text: str) -> None:
        self._log, self._text = log, text
        self._times, self._said_at = 0, float("-inf")

    def note(self, *values: object) -> None:
        """Note that it happened again; `values` are for the text's placeholders."""
        self._times += 1
        if (now := time.monotonic()) - self._said_at >= SELDOM_S:
            self._log.warning(f"%d {self._text}", self._times, *values)
            self._times, self._said_at = 0, now


class JsonFormatter(logging.Formatter):
    """One object per line: `time` (UTC), `level`, `logger`, `message`, and if there are such, `request_id`, `error`."""

    def format(self, record: logging.LogRecord) -> str:
        facts = {
            "time": dt.datetime.fromtimestamp(record.created, dt.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if cause := request_id.get():
            facts["request_id"] = cause
        if record.exc_info:
            facts["error"] = self.formatException(record.exc_info)
        return in_json(without_links(json.dumps(facts, ensure_ascii=False)))
