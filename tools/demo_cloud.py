"""`make demo-cloud`: the server with an AWS account that isn't one.

A small AWS of this machine (tests/cloud) stands in for the real one: instance types, prices, spot prices, quotas, and
machines that really run their user data, each in a folder of its own. Nothing leaves this machine, and nothing costs.
The server's files lie in `var/demo-cloud`, apart from those of `make run`; the cloud's are gone when it ends.
"""

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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

REGIONS = ["eu-west-1", "us-east-1"]
QUOTAS = {"L-DB2E81BA": 64, "L-3819A6DF": 32, "L-417A185B": 0, "L-7212CCBC": 96}
"""On-demand G and spot G leave room for a few machines; on-demand P says what "no quota" looks like."""
READY_S = 120


def main() -> int:
    """Runs until Ctrl-C; returns the server's exit status."""
    home = Path(os.environ.get("DSTACKWEB_HOME") or ROOT / "var" / "demo-cloud")
    port = os.environ.get("DSTACKWEB_PORT", "8000")
    home.mkdir(parents=True, exist_ok=True)
    os.environ["DSTACKWEB_HOME"] = str(home)

    from tests.cloud import Cloud

    print("Starting a small AWS on this machine …", flush=True)
    cloud = Cloud.start()
    for code, value in QUOTAS.items():
        cloud.quota(code, value)
    token = os.environ.get("DSTACKWEB_ADMIN_TOKEN") or secrets.token_urlsafe(24)
    url = f"http://127.0.0.1:{port}"
    env = os.environ | cloud.env | {"DSTACKWEB_PUBLIC_URL": url, "DSTACKWEB_ADMIN_TOKEN": token}
    server = subprocess.Popen([sys.executable, "manage.py", "up"], cwd=ROOT, env=env)
    # Ctrl-C reaches the server, too; the cloud goes after it, so that it still hears what is to end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda signum, _frame: server.send_signal(signum))
    threading.Thread(target=set_up, args=(url, token, server), daemon=True).start()
    try:
        return server.wait()
    finally:
        cloud.stop()


def set_up(url: str, token: str, server: subprocess.Popen[bytes]) -> None:
    """Once the server answers: name the cloud as a backend, and say what to look at."""
    ends = time.monotonic() + READY_S
    while server.poll() is None and time.monotonic() < ends:
        try:
            ask(url, token, "GET", "/readyz")
            break
        except OSError:
            time.sleep(0.2)
    else:
        return
    config = {
        "regions": REGIONS, "families": ["g5", "g6", "p4d", "p5", "c5", "m5"], "allow_private_url": True, "disk_gb": 8,
        "credentials": "default",
    }  # fmt: skip
    try:
        ask(url, token, "PUT", "/api/v1/backends/aws", {"type": "aws", "config": config})
    except urllib.error.HTTPError as error:
        print(f"the cloud can't be set up as a backend: {error.read().decode()}", file=sys.stderr, flush=True)
        return
    print(
        f"\n  Demo cloud   backend `aws`, regions {' and '.join(REGIONS)}; none of it is real, none of it costs\n"
        f"  Offers       {url}/p/main/offers/   (there within some seconds)\n"
        f"  A run there  .venv/bin/dstackweb login {url} --token {token}\n"
        f"               .venv/bin/dstackweb apply -f examples/cloud.yaml\n",
        flush=True,
    )


def ask(url: str, token: str, method: str, path: str, body: dict[str, Any] | None = None) -> None:
    """A call of the server's API, whose answer doesn't matter."""
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url + path, data, headers, method=method), timeout=10):
        pass


if __name__ == "__main__":
    sys.exit(main())
