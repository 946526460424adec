"""The configuration of gunicorn: a few threads in one process serve hundreds of polling pages."""

from __future__ import annotations

import os

from dstackweb import settings
from dstackweb.lib.process import collect_rarely, die_with_supervisor

die_with_supervisor()
collect_rarely()

bind = f"{settings.url_host(settings.DSTACKWEB_HOST)}:{settings.DSTACKWEB_PORT}"
worker_class = "gthread"
workers = settings.DSTACKWEB_WEB_WORKERS
threads = settings.DSTACKWEB_WEB_THREADS
keepalive = 30  # pages poll every few seconds on the same connection
graceful_timeout = 5
timeout = 60
worker_tmp_dir = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108
control_socket_disable = True
