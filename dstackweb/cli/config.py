"""The saved servers, each with a token and a project: `~/.config/dstackweb/config.toml`, and which one a call uses."""

from __future__ import annotations

import json
import os
import re
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from dstackweb.cli.language import _, listed
from dstackweb.cli.output import GIVEN, CliError, UsageError
from dstackweb.lib.network import is_loopback

if TYPE_CHECKING:
    from dstackweb.cli.client import Api as Api  # others name it in annotations as `config.Api`

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_PROJECT = "main"


@dataclass(frozen=True)
class Server:
    url: str
    token: str = field(repr=False)
    project: str


@dataclass(frozen=True)
class Settings(Server):
    """The server, token and project of a command. `token_from` is the source of a stored token."""

    token_from: str


@dataclass(frozen=True)
class Saved:
    """The saved servers by name, and the name of the one that commands use; both empty before the first `login`."""

    current: str
    servers: dict[str, Server]

    def named(self, name: str) -> Server:
        """Raises UsageError for a name that is not saved."""
        if name not in self.servers:
            known = (
                _("Saved servers: {names}", names=listed([*self.servers])) if self.servers else _("No server is saved.")
            )
            raise UsageError(
                _("no server is called {name!r}.", name=name),
                known,
                _("To add it: dstackweb servers add {name} URL", name=name),
            )
        return self.servers[name]

    def at(self, url: str) -> str:
        """The name of the server with this URL: the current one, or another; empty if none has it."""
        names = sorted(self.servers, key=lambda name: name != self.current)
        return next((name for name in names if self.servers[name].url == url), "")


def tokens_page(url: str) -> str:
    return f"{url}/account/tokens/"


def config_path() -> Path:
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / "dstackweb" / "config.toml"


def normal_url(text: str) -> str:
    """The URL as it is stored: without a trailing slash; without a scheme it gets https, or http on this machine.

    Raises UsageError for anything but an http(s) URL.
    """
    text = text.strip()
    if "://" not in text:
        host = urlsplit(f"//{text}").hostname
        text = f"{'http' if host and is_loopback(host) else 'https'}://{text}"
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 0) >= 0
    except ValueError:
        usable = False
    if not usable:
        raise UsageError(_("invalid server URL {text!r}.", text=text), _("Example: {url}", url=DEFAULT_URL))
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"


def name_of(text: str) -> str:
    """A name for a server. Raises UsageError for one that a shell or the file might read in another way."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,99}", text):
        raise UsageError(_("invalid server name {text!r}.", text=text), _("Use letters, digits and . _ : -"))
    return text


def is_token(text: str) -> bool:
    """Whether the text can be sent as a token; only the server knows whether it is valid."""
    return bool(text) and text.isascii() and text.isprintable() and " " not in text


def stored() -> Saved:
    """The servers that `login` saved. Raises CliError if the file can't be read."""
    path = config_path()
    try:
        data = tomllib.loads(path.read_text("utf-8"))
        servers = {
            name: Server(str(one["url"]), str(one["token"]), str(one["project"]))
            for name, one in data.get("servers", {}).items()
        }
    except FileNotFoundError:
        return Saved("", {})
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise CliError(
            _("can't read {file}: {reason}", file=path, reason=error), _("To write it again: dstackweb login URL")
        ) from None
    current = str(data.get("current", ""))
    return Saved(current if current in servers else next(iter(servers), ""), servers)


def load() -> Settings:
    """The settings of this call. Raises UsageError without a token, or if the stored one is for another server.

    `--server` beats the environment, whose token is for another server.
    """
    saved = stored()
    env: Mapping[str, str] = {} if "server" in GIVEN else os.environ
    name = GIVEN.get("server") or env.get("DSTACKWEB_SERVER", "")
    if url := normal_url(env["DSTACKWEB_URL"]) if env.get("DSTACKWEB_URL") else "":
        name = saved.at(url)
        server = saved.servers.get(name)
    else:
        server = saved.named(name) if name else saved.servers.get(saved.current)
        url = server.url if server else DEFAULT_URL
    token, token_from = env.get("DSTACKWEB_TOKEN", ""), "DSTACKWEB_TOKEN"
    if not token and server:
        token, token_from = server.token, str(config_path())
    if not token and saved.servers:
        raise UsageError(
            _("DSTACKWEB_URL is {url}, but no token is saved for it. No token was sent.", url=url),
            _("Set DSTACKWEB_TOKEN too, or run: dstackweb login {url}", url=url),
        )
    if not token:
        raise UsageError(
            _("not logged in."), _("Run dstackweb login {url}, or set DSTACKWEB_URL and DSTACKWEB_TOKEN.", url=url)
        )
    if not is_token(token):
        raise UsageError(_("invalid API token in {source}.", source=token_from))
    project = GIVEN.get("project") or env.get("DSTACKWEB_PROJECT") or (server.project if server else DEFAULT_PROJECT)
    return Settings(url, token, project, token_from)


def environment_token(url: str) -> str:
    """DSTACKWEB_TOKEN for a login at `url`; empty if it is for another server, that of DSTACKWEB_URL."""
    its_url = os.environ.get("DSTACKWEB_URL", "")
    return "" if its_url and normal_url(its_url) != url else os.environ.get("DSTACKWEB_TOKEN", "")


def connect(patience_s: float | None = None) -> Api:
    """A client with the settings of this call. Imports the HTTP library, which is slow to load.

    With `patience_s` each request is tried once, and waits no longer than that.
    """
    from dstackweb.cli.client import Api

    return Api(load(), patience_s=patience_s)


def store(saved: Saved) -> Path:
    """Save the servers for later calls. Raises CliError if the file can't be written."""
    lines = [f"current = {_quoted(saved.current)}\n"]
    for name, server in saved.servers.items():
        lines.append(f"\n[servers.{_quoted(name)}]\n")
        lines += [f"{key} = {_quoted(getattr(server, key))}\n" for key in ("url", "token", "project")]
    return write_private(config_path(), lines)


def _quoted(text: str) -> str:
    """As a TOML basic string: a JSON string is one too, except for DEL, which no name, token or URL contains."""
    return json.dumps(text, ensure_ascii=False)


def write_private(path: Path, lines: Iterable[str]) -> Path:
    """Write a file that only this user can read, and replace the old one in one step. Raises CliError."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # made with 0600
        try:
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                file.writelines(lines)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise CliError(_("can't write {file}: {reason}", file=path, reason=error.strerror)) from None
    return path


def forget(name: str) -> None:
    """Delete a saved server with its token, and the file with the last one; another becomes the current one.

    Raises UsageError for a name that is not saved, and CliError if the file can't be written.
    """
    saved = stored()
    saved.named(name)
    servers = {other: server for other, server in saved.servers.items() if other != name}
    if servers:
        store(Saved(saved.current if saved.current in servers else next(iter(servers)), servers))
        return
    try:
        config_path().unlink()
    except OSError as error:
        raise CliError(_("can't remove {file}: {reason}", file=config_path(), reason=error.strerror)) from None
