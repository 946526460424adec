"""User data of a cloud instance: a shell script that downloads and starts the agent at the first boot. Pure."""

from __future__ import annotations

import shlex

_SCRIPT = r"""
umask 077

say() {
  printf 'dstackweb: %s\n' "$*"
}

off() {
  if [ -n "$allocation" ]; then
    say "$1"
    exit 1
  fi
  say "$1; shutting down"
  sleep 5 # so that the console output is collected
  shutdown -h now || poweroff || halt -p
  exit 1
}

# One folder per instance: an AMI made from another instance may contain that instance's folder.
above="$HOME/.dstackweb"
# Root's home is closed to jobs, and an allocation leaves nothing elsewhere.
if [ -z "$HOME" ] || [ "$allocation$(id -u)" = --allocation0 ] || ! mkdir -p "$above"; then
  above=/var/lib/dstackweb
  mkdir -p "$above" || off 'neither $HOME nor /var/lib is writable'
fi
folder="$above/$instance"
mkdir -p "$folder"
# The jobs' user may pass through to the runs' directories, but not list these.
chmod 711 "$above" "$folder"

find_python() {
  for name in python3 python3.14 python3.13 python3.12 python3.11 python3.10 python3.9; do
    # Its own path: a name may lead to a slow wrapper, such as pyenv's.
    python=$("$name" -IS -c 'import sys; print(sys.version_info >= (3, 9) and sys.executable or "")' 2>/dev/null)
    [ -z "$python" ] || return 0
  done
}
find_python
if [ -z "$python" ] && [ -n "$allocation" ]; then
  # Clusters often have a newer one where a login shell finds it.
  PATH=$("${SHELL:-/bin/sh}" -lc 'printf %s "$PATH"' 2>/dev/null </dev/null)
  find_python
fi
[ -n "$python" ] || off 'the agent needs Python 3.9 or newer, which this image does not have'

# Allocations keep it for the next ones. Processes of the same user can write there: the digest decides.
kept=
[ -z "$allocation" ] || kept="$above/runner-$sha256.pyz"
fetch() {
  "$python" -IS - "$api/api/v1/runner/pyz" "$folder/runner.pyz" "$sha256" "$kept" <<'END'
import contextlib, hashlib, os, sys, time

url, path, wanted, kept = sys.argv[1:]
data = b""

def digest():
    return hashlib.sha256(data).hexdigest()

def write(target):
    with open(f"{path}.new", "wb") as file:
        file.write(data)
    os.replace(f"{path}.new", target)

def keep():
    write(kept)
    above = os.path.dirname(kept)
    for old in (os.path.join(above, name) for name in os.listdir(above) if name.startswith("runner-")):
        if time.time() - os.lstat(old).st_mtime > 30 * 86400:
            os.unlink(old)

with contextlib.suppress(OSError):
    safely = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    with open(kept, "rb", opener=lambda name, _: os.open(name, safely)) as file:
        data = file.read(1 << 24)
    os.utime(kept)
if digest() != wanted:
    try:
        import urllib.request

        request = urllib.request.Request(url, headers={"User-Agent": "dstackweb-agent"})
        data = urllib.request.urlopen(request, timeout=60).read()
    except Exception as error:
        sys.exit(f"dstackweb: {url} can't be fetched: {error}")
    if digest() != wanted:
        sys.exit(f"dstackweb: {url} has the SHA-256 {digest()}, expected {wanted}")
    if kept:
        with contextlib.suppress(OSError):
            keep()
write(path)
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
[ -n "$fetched" ] || off 'the agent cannot be downloaded'

# Without an agent the instance is useless, unless it has joined and may have a job.
keep() {
  trap '' HUP
  tries=0
  while :; do
    "$python" -IS "$folder/runner.pyz" agent --api "$api" --instance "$instance" --home "$folder" $insecure $allocation
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
if [ -n "$allocation" ]; then
  # The allocation lasts as long as this script. A signal to all of it is for the agent, which ends its job.
  trap 'rm -rf "$folder"' EXIT
  trap : TERM
  keep </dev/null
fi
keep </dev/null &
"""


def user_data(
    *, api_url: str, instance: str, join_token: str, pyz_sha256: str, insecure: bool, allocation: bool = False
) -> str:
    """The script for one instance (its UUID); the same for the same arguments. Needs Python 3.9.

    It downloads the runner from `api_url`, checks its SHA-256 (hex), and restarts the agent if it fails. An instance
    whose agent can't be started shuts down. `insecure` allows plain HTTP to another machine. Output goes to the
    console. An `allocation` of a cluster ends with the script, which shuts nothing down and removes its files.
    """
    values = {
        "api": api_url.rstrip("/"),
        "instance": instance,
        "sha256": pyz_sha256,
        "insecure": "--insecure" if insecure else "",
        "allocation": "--allocation" if allocation else "",
        "DSTACKWEB_JOIN_TOKEN": join_token,
    }
    lines = [f"{name}={shlex.quote(value)}" for name, value in values.items()]
    return "\n".join(["#!/bin/sh", *lines, "export DSTACKWEB_JOIN_TOKEN"]) + "\n" + _SCRIPT
