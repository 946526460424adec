"""What a log costs in each storage: a heartbeat's output, reading the newest of it, and all of it, as it grows.

python -m bench.storage [sqlite|postgres] [MIB …]

The floor is a plain file without a lock. Object storage is a local stand-in for S3 over HTTP, so its figures are of
dstackweb's and boto3's work, not of a network.
"""

from __future__ import annotations

import datetime as dt
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path

from bench import sides

SIZES = (1, 10, 100)
OUTPUT = os.urandom(4096)
TAIL = 1 << 16
REPEATS = 7


def measure(sizes: list[int]) -> None:
    """Prints the table of this process's database."""
    import boto3
    import django

    django.setup()
    from django.core.management import call_command
    from django.utils import timezone
    from moto.server import ThreadedMotoServer

    from dstackweb.lib.models import StoredPart
    from dstackweb.lib.storage import PIECE, Storage, pieces, rows, storage_at

    call_command("migrate", verbosity=0)
    rows.SECONDS = 600.0
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    s3 = ThreadedMotoServer(port=0, verbose=False)
    s3.start()
    endpoint = "http://{}:{}".format(*s3.get_host_and_port())
    boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1").create_bucket(Bucket="bench")
    home = Path(tempfile.mkdtemp(dir=os.environ["DSTACKWEB_HOME"]))
    places = {
        "disk": storage_at("", home),
        sides.database(): storage_at("database", home),
        "objects": storage_at(f"s3://bench/?endpoint_url={endpoint}&region_name=us-east-1", home),
    }
    keys = count()

    def measured(place: Storage, key: str, size: int) -> dict[str, str]:
        """Cells of a log that has this size."""

        def append() -> Callable[[], object]:
            end = place.size(key) or 0
            return lambda: place.append(key, end, OUTPUT)

        acts: dict[str, Callable[[], Callable[[], object]]] = {
            "append 4 KiB": append,
            "newest 64 KiB": lambda: lambda: sides.must_be(len(place.read(key, size - TAIL, TAIL)), TAIL),
            "all": lambda: lambda: sides.must_be(sum(map(len, pieces(place, key, 0, size))), size),
        }
        return {what: sides.measured(prepare, REPEATS) for what, prepare in acts.items()}

    def plain() -> Callable[[], object]:
        fd = os.open(home / "plain", os.O_RDWR | os.O_CREAT | os.O_APPEND)
        return lambda: (os.write(fd, OUTPUT), os.close(fd))

    table: dict[str, list[str]] = {f"append {len(OUTPUT) >> 10} KiB: a plain file": []}
    table |= {f"{what}: {name}": [] for what in ("append 4 KiB", "newest 64 KiB", "all") for name in places}
    for size in (mib << 20 for mib in sizes):
        table["append 4 KiB: a plain file"].append(sides.measured(plain, REPEATS))
        for name, place in places.items():
            key = f"joblogs/{next(keys)}"
            for offset in range(0, size, PIECE):
                place.append(key, offset, os.urandom(PIECE))
            StoredPart.objects.update(at=timezone.now() - dt.timedelta(hours=1))
            place.settle()
            for what, cell in measured(place, key, size).items():
                table[f"{what}: {name}"].append(cell)
            place.remove(key)
    sides.table(f"{sides.database()}, milliseconds, size of the log:", [f"{mib:,} MiB" for mib in sizes], table)
    s3.stop()


if __name__ == "__main__":
    os.environ |= {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench"}
    if sides.here():
        measure([int(size) for size in sys.argv[1:]] or list(SIZES))
    else:
        sides.on_each_side(sys.argv[1:])
