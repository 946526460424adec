"""Report a program's tasks to the progress pages. Standard library only."""

from dstackweb.tracking.current import flush
from dstackweb.tracking.items import track
from dstackweb.tracking.tasks import task, waiting

__all__ = ["flush", "task", "track", "waiting"]
