"""The longest wait of a web request for what another transaction has locked.

Requests have few threads: if each waited as long as someone keeps a row, one stuck transaction would stop every server.
After this time the answer is 503 with `Retry-After`, and nothing was changed. Workers wait as long as it takes.
"""

from __future__ import annotations

from typing import Any

WAIT_S = 5


def limit(database: dict[str, Any]) -> None:
    """Limit the waits of a database of Django's settings, for connections that are made from now on."""
    options = database["OPTIONS"]
    if database["ENGINE"] == "django.db.backends.sqlite3":
        options["timeout"] = WAIT_S
    elif "options" in options:
        options["options"] += f" -c lock_timeout={WAIT_S * 1000}"
    else:
        options["lock_timeout_ms"] = WAIT_S * 1000
