"""`make demo-cloud`: the server with a simulated AWS account.

A small AWS on this machine (standins/aws) replaces the real one: instance types, prices, spot prices, quotas,
and instances that run their user data, each in a folder of its own. It uses no network and costs nothing. The server's
files are in `var/demo-cloud`, apart from those of `make run`; the cloud's are deleted when it ends.
"""

from __future__ import annotations

from standins.aws import Cloud
from tools.served import Demo, complain, run_demo

REGIONS = ["eu-west-1", "us-east-1"]
QUOTAS = {"L-DB2E81BA": 64, "L-3819A6DF": 32, "L-417A185B": 0, "L-7212CCBC": 96}
"""On-demand G and spot G leave room for a few instances; on-demand P shows "no quota"."""


def main(demo: Demo) -> int:
    """Run until Ctrl-C; returns the server's exit status."""
    print("Starting a small AWS on this machine …", flush=True)
    cloud = Cloud.start()
    for code, value in QUOTAS.items():
        cloud.quota(code, value)
    try:
        return demo.serve(lambda: set_up(demo), env=cloud.env | {"DSTACKWEB_PUBLIC_URL": demo.url})
    finally:
        cloud.stop()


def set_up(demo: Demo) -> None:
    """Add the cloud as a backend, and print what to look at."""
    config = {
        "regions": REGIONS, "families": ["g5", "g6", "p4d", "p5", "c5", "m5"], "allow_private_url": True, "disk_gb": 8,
        "credentials": "default",
    }  # fmt: skip
    try:
        demo.call("PUT", "backends/aws", {"type": "aws", "config": config})
    except OSError as error:
        complain("the cloud can't be set up as a backend", error)
        return
    print(
        f"  Demo cloud backend `aws`, regions {' and '.join(REGIONS)}: simulated, free of charge\n"
        f"             its offers, within some seconds: {demo.url}/p/main/offers/\n"
        f"             a run there: .venv/bin/dstackweb login {demo.url} --token {demo.token}\n"
        f"                          .venv/bin/dstackweb apply -f examples/cloud.yaml\n",
        flush=True,
    )


if __name__ == "__main__":
    run_demo("cloud", main)
