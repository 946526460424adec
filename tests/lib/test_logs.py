"""Lines of logs, and the id of the request that caused them."""

from __future__ import annotations

import contextvars
import json
import logging
import re
import secrets
import sys

import pytest
from django.test import Client

from dstackweb.lib import logs


def record(message: str, *args: object, error: bool = False) -> logging.LogRecord:
    info = None
    if error:
        try:
            raise ValueError("no disk")
        except ValueError:
            info = sys.exc_info()
    return logging.LogRecord("dstackweb.x", logging.ERROR, "x.py", 1, message, args, info)


def within(request_id: str, formatter: logging.Formatter, line: logging.LogRecord) -> str:
    def write() -> str:
        logs.request_id.set(request_id)
        return formatter.format(line)

    return contextvars.Context().run(write)


def test_a_name_in_a_log_can_neither_forge_a_line_nor_reach_the_terminal() -> None:
    name = "x\x1b[2J\u202e\x9b\n2026-01-01 00:00:00 INFO dstackweb.x: root signed in"
    text = within("", logs.TextFormatter(), record("no user %s", name))
    assert text.splitlines()[0].endswith("no user x[U+001B][2J[U+202E][U+009B]")
    assert [line for line in text.splitlines()[1:] if not line.startswith("    ")] == []
    line = within("", logs.JsonFormatter(), record("no user %s", name))
    assert (line.isascii(), json.loads(line)["message"]) == (True, f"no user {name}")


@pytest.mark.parametrize("sent", ["a1b2", "Root=1-67891233-abcdef", "0f8fad5b-d9cb-469f-a165-70867728950e"])
def test_a_request_id_sent_by_the_client_is_kept(sent: str) -> None:
    assert contextvars.Context().run(logs.take, sent) == sent


@pytest.mark.parametrize("sent", [None, "", "a b", "x" * 65, "a\nb", "ä", '"}'])
def test_an_invalid_request_id_is_replaced_by_a_new_one(sent: str | None) -> None:
    first, second = (contextvars.Context().run(logs.take, sent) for _ in range(2))
    assert first != second
    assert re.fullmatch("[0-9a-f]{16}", first)


def test_a_json_line_has_time_message_and_traceback() -> None:
    said = json.loads(within("a1", logs.JsonFormatter(), record("job %s\nis lost", 7, error=True)))
    error = said.pop("error")
    assert error.endswith("ValueError: no disk")
    assert said.pop("time").endswith("+00:00")
    assert said == {"level": "ERROR", "logger": "dstackweb.x", "message": "job 7\nis lost", "request_id": "a1"}
    assert "request_id" not in json.loads(within("", logs.JsonFormatter(), record("x")))


def test_a_line_of_text_ends_with_its_request() -> None:
    lines = within("a1", logs.TextFormatter(), record("job lost", error=True)).splitlines()
    assert lines[0].endswith(" ERROR dstackweb.x: job lost [a1]")
    assert lines[-1] == "    ValueError: no disk"
    assert within("", logs.TextFormatter(), record("job lost")).endswith("x: job lost")


@pytest.mark.parametrize("formatter", [logs.TextFormatter(), logs.JsonFormatter()], ids=["text", "json"])
@pytest.mark.parametrize("kind", ["invite", "login"])
def test_the_token_of_a_link_that_is_refused_is_in_no_log(
    formatter: logging.Formatter, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    token = secrets.token_urlsafe(32)
    client = Client(enforce_csrf_checks=True)  # whose forms come from no page
    assert client.post(f"/{kind}/{token}/", {"name": "x"}).status_code == 403
    assert client.get(f"/{kind}/{token}/more").status_code == 404
    lines = [formatter.format(record) for record in caplog.records]
    assert len([line for line in lines if f"/{kind}/***/" in line]) == 2
    assert not [line for line in lines if token in line]
