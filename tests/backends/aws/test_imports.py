"""boto3 costs a tenth of a second and tens of megabytes: only what asks AWS has it."""

from __future__ import annotations

import subprocess
import sys


def test_the_web_server_and_whatever_reads_offers_do_without_boto3() -> None:
    code = """
import sys, django
django.setup()
import dstackweb.urls, dstackweb.backends.registry, dstackweb.backends.aws.kind, dstackweb.backends.aws.errors
print(sorted(name for name in sys.modules if name.partition(".")[0] in ("boto3", "botocore")))
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"
