"""What static/js/rows.js sends for rows of the queue page, from what the page has served."""

from __future__ import annotations

import html
import re
from typing import Any

from django.test import Client

from dstackweb.runs.models import Run
from tests.forms import open_form, send_by_script

QUEUE = "/p/main/queue/"


def token(run: Run | str, client: Client, page: Any = QUEUE) -> str:
    """The box in the row of a run or of a sweep's line, which says what the reader saw. Others' rows have none."""
    key = run if isinstance(run, str) else str(run.pk)
    boxes = [control.value for control in open_form(client, page, having="run").controls if control.name == "run"]
    return next(box for box in boxes if box.partition(".")[0] == key)


def act(client: Client, *rows: Run | str, page: Any = QUEUE, **values: Any) -> Any:
    """Do something to these rows of the queue page, an address or the answer that served it."""
    if isinstance(page, str):
        page = client.get(page)
    address = re.search(r'id="queue-actions"[^>]*data-url="([^"]*)"', page.text)
    assert address, "this page changes no rows"
    tokens = ",".join(token(row, client, page) for row in rows)
    return send_by_script(client, page, html.unescape(address[1]), {"run": tokens, **values})
