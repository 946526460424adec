"""`make demo-cloud`: the server with an AWS account that isn't one.

A small AWS of this machine (dstackweb/devtools/aws) stands in for the real one: instance types, prices, spot prices,
quotas, and machines that really run their user data, each in a folder of its own. Nothing leaves this machine,
and nothing costs.
The server's files lie in `var/demo-cloud`, apart from those of `make run`; the cloud's are gone when it ends.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
from pathlib import Path

from served import ask, relay, told

ROOT = Path(__file__).resolve().parent.parent

REGIONS = ["eu-west-1", "us-east-1"]
QUOTAS = {"L-DB2E81BA": 64, "L-3819A6DF": 32, "L-417A185B": 0, "L-7212CCBC": 96}
"""On-demand G and spot G leave room for a few machines; on-demand P says what "no quota" looks like."""


def main() -> int:
    """Runs until Ctrl-C; returns the server's exit status."""
    home = Path(os.environ.get("DSTACKWEB_HOME") or ROOT / "var" / "demo-cloud")
    port = os.environ.get("DSTACKWEB_PORT", "8000")
    home.mkdir(parents=True, exist_ok=True)
    os.environ["DSTACKWEB_HOME"] = str(home)

    from dstackweb.devtools.aws import Cloud

    print("Starting a small AWS on this machine …", flush=True)
    cloud = Cloud.start()
    for code, value in QUOTAS.items():
        cloud.quota(code, value)
    token = os.environ.get("DSTACKWEB_ADMIN_TOKEN") or secrets.token_urlsafe(24)
    url = f"http://127.0.0.1:{port}"
    own = {"DSTACKWEB_PUBLIC_URL": url, "DSTACKWEB_ADMIN_TOKEN": token, "PYTHONUNBUFFERED": "1"}
    env = os.environ | cloud.env | own
    server = subprocess.Popen([sys.executable, "manage.py", "up"], cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
    # Ctrl-C reaches the server, too; the cloud goes after it, so that it still hears what is to end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda signum, _frame: server.send_signal(signum))
    threading.Thread(target=relay, args=(server, url, token, set_up), daemon=True).start()
    try:
        return server.wait()
    finally:
        cloud.stop()


def set_up(url: str, token: str) -> None:
    """Name the cloud as a backend, and say what to look at."""
    config = {
        "regions": REGIONS, "families": ["g5", "g6", "p4d", "p5", "c5", "m5"], "allow_private_url": True, "disk_gb": 8,
        "credentials": "default",
    }  # fmt: skip
    try:
        ask(url, token, "PUT", "/api/v1/backends/aws", {"type": "aws", "config": config})
    except OSError as error:
        print(f"the cloud can't be set up as a backend: {told(error)}", file=sys.stderr, flush=True)
        return
    print(
        f"  Demo cloud backend `aws`, regions {' and '.join(REGIONS)}: none of it is real, none of it costs\n"
        f"             its offers, within some seconds: {url}/p/main/offers/\n"
        f"             a run there: .venv/bin/dstackweb login {url} --token {token}\n"
        f"                          .venv/bin/dstackweb apply -f examples/cloud.yaml\n",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
