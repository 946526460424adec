"""Django's backend for PostgreSQL, with a check of connections that sends nothing, and limits behind a PgBouncer."""

from __future__ import annotations

import select
from typing import Any

from django.db.backends.postgresql import base


class DatabaseWrapper(base.DatabaseWrapper):
    """A kept connection is checked at the first statement of each request and task (`CONN_HEALTH_CHECKS`).

    A server that has closed it has said so: there is something to read. Without that it is as good as a `SELECT 1`
    would show, since one over a network that is cut off takes as long to fail as the statement itself.

    The option `lock_timeout_ms` is set in each transaction: a PgBouncer drops settings of a session.
    """

    lock_timeout_ms = 0

    def get_connection_params(self) -> dict[str, Any]:
        params: dict[str, Any] = super().get_connection_params()
        self.lock_timeout_ms = params.pop("lock_timeout_ms", 0)
        return params

    def set_autocommit(self, autocommit: bool, force_begin_transaction_with_broken_autocommit: bool = False) -> None:
        super().set_autocommit(autocommit, force_begin_transaction_with_broken_autocommit)
        if self.lock_timeout_ms and not autocommit:
            with self.cursor() as cursor:
                cursor.execute(f"SET LOCAL lock_timeout = {self.lock_timeout_ms:d}")

    def is_usable(self) -> bool:
        """Whether the connection works; asks the server only where it has sent something by itself."""
        if self.connection is None or self.connection.closed:
            return False
        poll = select.poll()
        poll.register(self.connection.fileno(), select.POLLIN)
        return super().is_usable() if poll.poll(0) else True
