"""Django's backend for PostgreSQL, with a check of connections that sends nothing."""

from __future__ import annotations

import select

from django.db.backends.postgresql import base


class DatabaseWrapper(base.DatabaseWrapper):
    """A kept connection is checked at the first statement of each request and task (`CONN_HEALTH_CHECKS`).

    A server that has closed it has said so: there is something to read. Without that it is as good as a `SELECT 1`
    would show, since one over a network that is cut off takes as long to fail as the statement itself.
    """

    def is_usable(self) -> bool:
        """Whether the connection works; asks the server only where it has sent something by itself."""
        if self.connection is None or self.connection.closed:
            return False
        poll = select.poll()
        poll.register(self.connection.fileno(), select.POLLIN)
        return super().is_usable() if poll.poll(0) else True
