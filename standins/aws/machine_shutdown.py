"""`shutdown`, `poweroff` and `halt` on a machine: asks the cloud to switch it off."""

from __future__ import annotations

import os
import sys
import urllib.request


def main() -> int:
    name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
    after_s = 60 if name == "shutdown" else 0
    for word in words:
        if word == "now":
            after_s = 0
        elif word.lstrip("+").isdigit():
            after_s = 60 * int(word.lstrip("+"))
        elif word == "-c":
            after_s = -1
        elif not word.startswith("-"):
            break
    url = f"{os.environ['AWS_EC2_METADATA_SERVICE_ENDPOINT']}/shutdown?after_s={after_s}"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(url, method="POST"), timeout=10):
        return 0


sys.exit(main())
