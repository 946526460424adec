"""What a cloud's machine runs at its first boot: a shell script that brings the agent onto it and starts it. Pure."""

from __future__ import annotations

import shlex

LIMIT_BYTES = 16384
"""EC2's, before it is encoded."""

_SCRIPT = r"""
umask 077

say() {
  printf 'dstackweb: %s\n' "$*"
}

off() {
  say "$1; this machine switches off"
  sleep 5 # for what collects the console's output
  shutdown -h now || poweroff || halt -p
  exit 1
}

# Of this machine alone: an image that was made of another machine may bring that one's folder along.
above="$HOME/.dstackweb"
if [ -z "$HOME" ] || ! mkdir -p "$above"; then
  above=/var/lib/dstackweb
  mkdir -p "$above" || off 'neither $HOME nor /var/lib can be written'
fi
folder="$above/$instance"
mkdir -p "$folder"
# The jobs' user enters these, since the runs' directories lie below, and sees nothing in them.
chmod 711 "$above" "$folder"

python=
for name in python3 python3.14 python3.13 python3.12 python3.11 python3.10 python3.9; do
  if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 9))' 2>/dev/null; then
    python=$name
    break
  fi
done
[ -n "$python" ] || off 'this image has no Python 3.9 or newer, which the agent needs'

fetch() {
  "$python" - "$api/api/v1/runner/pyz" "$folder/runner.pyz" "$sha256" <<'END'
import hashlib, os, sys, urllib.request

url, path, wanted = sys.argv[1:]
try:
    request = urllib.request.Request(url, headers={"User-Agent": "dstackweb-agent"})
    data = urllib.request.urlopen(request, timeout=60).read()
except Exception as error:
    sys.exit(f"dstackweb: {url} can't be fetched: {error}")
found = hashlib.sha256(data).hexdigest()
if found != wanted:
    sys.exit(f"dstackweb: what {url} sends has the SHA-256 {found} and not {wanted}")
with open(f"{path}.new", "wb") as file:
    file.write(data)
os.replace(f"{path}.new", path)
END
}

fetched=
for pause in 1 2 4 8 15 15 30 30 60 60 60 60 60 60; do
  if fetch; then
    fetched=1
    break
  fi
  sleep "$pause"
done
[ -n "$fetched" ] || off 'the agent can not be fetched'

# Without an agent nothing here is of use, until a job may run here.
keep() {
  trap '' HUP
  tries=0
  while :; do
    "$python" -IS "$folder/runner.pyz" agent --api "$api" --instance "$instance" --home "$folder" $insecure
    status=$?
    [ "$status" -eq 0 ] && exit 0
    if [ -s "$folder/token" ]; then
      say "the agent ended with $status; starting it again"
    else
      tries=$((tries + 1))
      [ "$status" -eq 2 ] || [ "$tries" -ge 20 ] && off "the agent does not start ($status)"
    fi
    sleep 5
  done
}

say "starting the agent of $instance with $("$python" --version 2>&1)"
keep </dev/null &
"""


def user_data(*, api_url: str, instance: str, join_token: str, pyz_sha256: str, insecure: bool) -> str:
    """The script for one instance (its UUID); the same for the same arguments. Needs Python 3.9 on the machine.

    It fetches the runner from `api_url`, believes it only with `pyz_sha256` (hex), and keeps the agent running after
    it has ended itself. What can't be started switches the machine off. `insecure` allows plain HTTP to another
    machine. Its output goes to the console.
    """
    values = {
        "api": api_url.rstrip("/"),
        "instance": instance,
        "sha256": pyz_sha256,
        "insecure": "--insecure" if insecure else "",
        "DSTACKWEB_JOIN_TOKEN": join_token,
    }
    lines = [f"{name}={shlex.quote(value)}" for name, value in values.items()]
    return "\n".join(["#!/bin/sh", *lines, "export DSTACKWEB_JOIN_TOKEN"]) + "\n" + _SCRIPT
