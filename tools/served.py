"""What the demos share: a server of their own until Ctrl-C, and calls of its API."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from dstackweb.lib.process import die_with_parent
from standins.programs import Missing

ROOT = Path(__file__).resolve().parent.parent
STOP_S = 15
ENDED = {"done", "failed", "terminated"}
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""A proxy that the environment names does not lead to this machine."""


def run_demo(name: str, demo: Callable[[Demo], int]) -> NoReturn:
    """Run `make demo-NAME` until Ctrl-C, SIGTERM or the end of its terminal, and exit.

    Each of these raises KeyboardInterrupt in it, so that it ends what it has started.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        sys.exit(demo(Demo(name)))
    except KeyboardInterrupt:
        sys.exit(130)
    except Missing as missing:
        sys.exit(f"make demo-{name} {missing}")
    except (RuntimeError, TimeoutError) as error:  # of a cluster or cloud that does not start
        sys.exit(f"make demo-{name}: {error}")


class Demo:
    """A server with files in `var/demo-NAME`, unless DSTACKWEB_HOME names another folder, and a token of its admin."""

    def __init__(self, name: str) -> None:
        self.home = Path(os.environ.get("DSTACKWEB_HOME") or ROOT / "var" / f"demo-{name}")
        self.home.mkdir(parents=True, exist_ok=True)
        os.environ["DSTACKWEB_HOME"] = str(self.home)
        self.url = f"http://127.0.0.1:{os.environ.get('DSTACKWEB_PORT', '8000')}"
        self.token = os.environ.get("DSTACKWEB_ADMIN_TOKEN") or secrets.token_urlsafe(24)

    def serve(
        self,
        set_up: Callable[[], None],
        *,
        env: Mapping[str, str] | None = None,
        stop: Callable[[], None] | None = None,
    ) -> int:
        """Run the server until Ctrl-C, calling `set_up` once it is ready and `stop` before its end.

        Returns its exit status.
        """
        own = {"DSTACKWEB_ADMIN_TOKEN": self.token, "PYTHONUNBUFFERED": "1"}
        # In a session of its own Ctrl-C doesn't reach it: the demo's runs, which outlive the server, end before it.
        server = subprocess.Popen(
            [sys.executable, "manage.py", "up"],
            cwd=ROOT, env=os.environ | (env or {}) | own, stdout=subprocess.PIPE, text=True, start_new_session=True,
            preexec_fn=die_with_parent,
        )  # fmt: skip

        is_ready = threading.Event()

        def relay() -> None:
            for line in server.stdout or ():
                if line.startswith("Logs:"):
                    is_ready.set()
                    set_up()
                print(line, end="", flush=True)

        threading.Thread(target=relay, daemon=True).start()
        try:
            return server.wait()
        except KeyboardInterrupt:
            # A second Ctrl-C ends the server at once, and with it the wait for the runs.
            signal.signal(signal.SIGINT, lambda number, _frame: server.send_signal(number))
            if stop is not None and is_ready.is_set():
                stop()
            server.terminate()
            code = server.wait()
            return 130 if code < 0 else code  # it was still starting

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The API's answer. Raises OSError."""
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/api/v1/{path}", data, headers, method=method)
        with DIRECT.open(request, timeout=10) as answer:
            return json.loads(answer.read())

    def status(self, run: str) -> str:
        """A run's status; empty if there is no such run."""
        try:
            return str(self.call("GET", f"projects/main/runs/{run}")["status"])
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return ""
            raise

    def is_active(self, run: str) -> bool:
        return self.status(run) not in {*ENDED, ""}

    def submit(self, name: str, **config: Any) -> None:
        """Submit a run that computes nothing, unless it is active."""
        if not self.is_active(name):
            commands = ["echo 'a demo: it computes nothing'", "sleep 12h"]
            self.call(
                "POST", "projects/main/runs", {"config": {"type": "task", "name": name, "commands": commands, **config}}
            )

    def stop_runs(self, names: Iterable[str]) -> None:
        """End these runs, if the server answers."""
        ends = time.monotonic() + STOP_S
        try:
            for name in filter(self.is_active, names):
                self.call("POST", f"projects/main/runs/{name}/stop", {"abort": True})
            while time.monotonic() < ends and any(map(self.is_active, names)):
                time.sleep(0.2)
        except OSError as error:
            complain("the demo's runs can't be stopped", error)


def complain(what: str, error: OSError) -> None:
    """Print what failed, with the API's own detail if it sent one."""
    detail = error.read().decode() if isinstance(error, urllib.error.HTTPError) else error
    print(f"{what}: {detail}", file=sys.stderr, flush=True)
