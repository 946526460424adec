"""Report a program's tasks to the progress pages. Standard library only."""

from dstackweb.tracking.current import flush
from dstackweb.tracking.tasks import task, track, waiting

__all__ = ["flush", "task", "track", "waiting"]
