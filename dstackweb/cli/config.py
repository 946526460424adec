"""The server, token and project: `~/.config/dstackweb/config.toml`, overridden by the environment."""

from __future__ import annotations

import json
import os
import tempfile
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from dstackweb.cli.output import CliError, UsageError
from dstackweb.lib.network import is_loopback

if TYPE_CHECKING:
    from dstackweb.cli.client import Api

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_PROJECT = "main"


@dataclass(frozen=True)
class Settings:
    """The server, token and project of a command. `token_from` is the source of a stored token."""

    url: str
    token: str
    project: str
    token_from: str


def tokens_page(url: str) -> str:
    """The page on which users of the server at `url` make API tokens."""
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
        raise UsageError(f"invalid server URL {text!r}.", f"Example: {DEFAULT_URL}")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"


def is_token(text: str) -> bool:
    """Whether the text can be sent as a token; only the server knows whether it is valid."""
    return bool(text) and text.isascii() and text.isprintable() and " " not in text


def stored() -> dict[str, str]:
    """The settings that `login` saved; empty before. Raises CliError if the file can't be read."""
    path = config_path()
    try:
        data = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CliError(f"can't read {path}: {error}", "To write it again: dstackweb login URL") from None
    return {key: value for key, value in data.items() if isinstance(value, str)}


def load() -> Settings:
    """The settings of this call. Raises UsageError without a token, or if the stored one is for another server."""
    saved, env = stored(), os.environ
    url = normal_url(env.get("DSTACKWEB_URL") or saved.get("url") or DEFAULT_URL)
    same_server = url == saved.get("url")
    token, token_from = env.get("DSTACKWEB_TOKEN", ""), "DSTACKWEB_TOKEN"
    if not token and saved.get("token"):
        if not same_server:
            raise UsageError(
                f"DSTACKWEB_URL is {url}, but the stored token is for {saved.get('url')}. The token was not sent.",
                f"Set DSTACKWEB_TOKEN too, or run: dstackweb login {url}",
            )
        token, token_from = saved["token"], str(config_path())
    if not token:
        raise UsageError("not logged in.", f"Run dstackweb login {url}, or set DSTACKWEB_URL and DSTACKWEB_TOKEN.")
    if not is_token(token):
        raise UsageError(f"invalid API token in {token_from}.")
    project = env.get("DSTACKWEB_PROJECT") or (saved.get("project") if same_server else None) or DEFAULT_PROJECT
    return Settings(url, token, project, token_from)


def connect() -> Api:
    """A client with the settings of this call. Imports the HTTP library, which is slow to load."""
    from dstackweb.cli.client import Api

    return Api(load())


def store(url: str, token: str, project: str) -> Path:
    """Save the settings for later calls. Raises CliError if the file can't be written."""
    # A JSON string is also a TOML basic string, except for DEL, which no token, URL or project contains.
    lines = [
        f"{key} = {json.dumps(value, ensure_ascii=False)}\n"
        for key, value in (("url", url), ("token", token), ("project", project))
    ]
    return write_private(config_path(), lines)


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
        raise CliError(f"can't write {path}: {error.strerror}") from None
    return path


def forget() -> bool:
    try:
        config_path().unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise CliError(f"can't remove {config_path()}: {error.strerror}") from None
    return True
