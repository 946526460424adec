"""What a release needs beside its builds: .github/workflows/release.yml and `make release-check`, `make dist` call it.

python -m tools.release check [TAG]   # version, changelog and tag fit each other; prints the version
python -m tools.release notes [URL]   # the version's part of CHANGELOG.md; links into the repository begin with URL
python -m tools.release base          # the image's base with its digest, as a build argument (needs docker buildx)
python -m tools.release try           # installs what is in dist/ in new environments, and starts the server
python -m tools.release serve PROGRAM # starts this dstackweb-server with an empty home, and looks at its sign-in page
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import venv
from pathlib import Path

from dstackweb import __version__

ROOT = Path(__file__).resolve().parent.parent
VERSION = re.compile(r"\d+\.\d+\.\d+(rc\d+)?")
HEADING = re.compile(r"^## (\S+) \((unreleased|\d{4}-\d\d-\d\d)\)\n", re.MULTILINE)
START_S = 120.0


def check(tag: str = "") -> str:
    """Return the version. With a tag it must be the tag's, and dated in the changelog."""
    if not VERSION.fullmatch(__version__):
        sys.exit(f"{__version__} in dstackweb/__init__.py is not a version such as 1.2.3 or 1.2.3rc1.")
    if tag and tag != f"v{__version__}":
        sys.exit(f"The tag is {tag}, and dstackweb/__init__.py says {__version__}: it must be v{__version__}.")
    heading = HEADING.search((ROOT / "CHANGELOG.md").read_text())
    if heading is None or heading[1] != __version__:
        sys.exit(f"CHANGELOG.md must begin with the heading '## {__version__} (unreleased)', or with a date there.")
    if tag and heading[2] == "unreleased":
        sys.exit(f"CHANGELOG.md says that {__version__} is unreleased: write the date there before you tag it.")
    if not notes().strip():
        sys.exit(f"CHANGELOG.md says nothing about {__version__}.")
    return __version__


def notes(url: str = "") -> str:
    """Return what CHANGELOG.md says about this version."""
    _before, *sections = re.split(r"^(?=## )", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    (section,) = (text for text in sections if text.startswith(f"## {__version__} ("))
    text = section.partition("\n")[2].strip() + "\n"
    return re.sub(r"\]\((?=[\w.-]+/|[\w-]+\.md)", f"]({url.rstrip('/')}/", text) if url else text


def base() -> str:
    """Return the build argument that pins what the image is built on: its name with the digest that it has now."""
    text = (ROOT / "Containerfile").read_text()
    (argument,) = set(re.findall(r"^FROM \$\{?(\w+)", text, re.MULTILINE))
    (image,) = re.findall(rf"^ARG {argument}=(\S+)$", text, re.MULTILINE)
    argv = ["docker", "buildx", "imagetools", "inspect", image, "--format", "{{.Manifest.Digest}}"]
    digest = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        sys.exit(f"docker gave no digest of {image}, but {digest!r}.")
    return f"{argument}={image}@{digest}"


def try_dist() -> None:
    """Install the wheel as a member and as an operator would: without and with what the server needs; and use both."""
    names = {f"dstackweb-{__version__}-py3-none-any.whl", f"dstackweb-{__version__}.tar.gz"}
    if {path.name for path in (ROOT / "dist").iterdir()} != names:
        sys.exit(f"dist/ must have {' and '.join(sorted(names))}, and nothing else.")
    wheel = ROOT / "dist" / f"dstackweb-{__version__}-py3-none-any.whl"
    with tempfile.TemporaryDirectory() as folder:
        for extra in ("", "[server]"):
            place = Path(folder) / ("server" if extra else "members")
            venv.create(place, with_pip=True)
            pip = [place / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            subprocess.run([*pip, f"{wheel}{extra}"], cwd=folder, check=True)
            shown = subprocess.run(
                [place / "bin" / "dstackweb", "--version"], cwd=folder, stdout=subprocess.PIPE, text=True, check=True
            )
            if shown.stdout != f"dstackweb {__version__}\n":
                sys.exit(f"dstackweb --version of the wheel printed {shown.stdout!r}.")
        serve(place / "bin" / "dstackweb-server", Path(folder) / "home")


def serve(program: Path, home: Path) -> None:
    """Start the server with an empty home, and stop it once it is ready and has shown its sign-in page."""
    home.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("DSTACKWEB_", "PYTHON"))}
    env |= {"DSTACKWEB_HOME": str(home), "DSTACKWEB_PORT": str(port), "DSTACKWEB_GATEWAY_PORT": "0"}
    server = subprocess.Popen([program, "up", "--no-host"], cwd=home, env=env)
    try:
        deadline = time.monotonic() + START_S
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5):
                    break
            except (urllib.error.URLError, OSError):
                if server.poll() is not None or time.monotonic() > deadline:
                    sys.exit("dstackweb-server up of the wheel did not get ready.")
                time.sleep(0.2)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/login/", timeout=30) as page:
            if b"<form" not in page.read():
                sys.exit("The server of the wheel shows no sign-in page.")
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def main(command: str = "", *argv: str) -> None:
    match command:
        case "check":
            print(check(*argv))
        case "notes":
            print(notes(*argv), end="")
        case "base":
            print(base())
        case "try":
            try_dist()
        case "serve":
            with tempfile.TemporaryDirectory() as folder:
                serve(Path(*argv).absolute(), Path(folder) / "home")
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(*sys.argv[1:])
