"""The configuration of gunicorn: a few threads in one process serve hundreds of polling pages."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import Any

from dstackweb import settings
from dstackweb.lib.process import collect_no_more_of_what_is_loaded, collect_rarely, die_with_supervisor

die_with_supervisor()
collect_rarely()

# The supervisor listens, and keeps the socket when this process is replaced.
_listener = os.environ.get("DSTACKWEB_LISTEN_FD")
_ready = os.environ.get("DSTACKWEB_READY_FD")
bind = f"fd://{_listener}" if _listener else f"{settings.url_host(settings.DSTACKWEB_HOST)}:{settings.DSTACKWEB_PORT}"
worker_class = "dstackweb.web_worker.WaitressWorker"
preload_app = True  # once for all processes, which share its memory
workers = settings.DSTACKWEB_WEB_WORKERS
threads = settings.DSTACKWEB_WEB_THREADS
graceful_timeout = 30  # for uploads during a reload; the supervisor waits less when all stop
timeout = 60
worker_tmp_dir = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108
control_socket_disable = True

if settings.DSTACKWEB_LOG_FORMAT == "json":
    own = {"handlers": ["stderr"], "level": "INFO", "propagate": False}
    logconfig_dict = {
        **settings.LOGGING, "root": {"level": "INFO", "handlers": ["stderr"]},
        "loggers": {"gunicorn.error": own, "gunicorn.access": own},
    }  # fmt: skip

BOOT_ERROR = 3
"""gunicorn's exit code of a worker that must not be started again."""


def when_ready(server: Any) -> None:
    """The program is loaded, and its processes are forked next."""
    collect_no_more_of_what_is_loaded()


def post_worker_init(worker: Any) -> None:
    """A server that is too old or too new for the database does not start, and stops as soon as it is too old."""
    from dstackweb.lib import schema

    try:
        schema.require()
    except schema.Refused as why:
        schema.say_on_stderr(str(why))
        sys.exit(BOOT_ERROR)
    schema.watch(lambda: os.kill(worker.ppid, signal.SIGTERM))
    if _ready:
        with contextlib.suppress(OSError):
            os.write(int(_ready), b"%d\n" % worker.ppid)
