"""`python -m standins.aws`: runs the cloud, and prints boto3's environment for it."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import sys
import tempfile
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m standins.aws", description=__doc__)
    parser.add_argument("--home", type=Path, help="its folder; without it, a temporary one")
    options = parser.parse_args()
    os.environ |= {"MOTO_DISABLE_GLOBAL_CORS": "true", "MOTO_EC2_LOAD_DEFAULT_AMIS": "false"}

    from standins.aws import env, server

    home = options.home or Path(tempfile.mkdtemp(prefix="cloud-"))

    def ready(url: str) -> None:
        for name, value in env(url).items():
            print(f"export {name}={shlex.quote(value)}", flush=True)
        address = home / "address.new"
        address.write_text(url)
        address.replace(home / "address")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
    try:
        server.serve(home, ready)
    except SystemExit:
        if options.home is None:
            shutil.rmtree(home, ignore_errors=True)
        os._exit(0)  # without a second's tidying of moto's records


main()
