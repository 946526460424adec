"""Which server, which token, which project: `~/.config/dstackweb/config.toml`, overridden by the environment."""

from __future__ import annotations

import json
import os
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from dstackweb.cli.errors import CliError, UsageError

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_PROJECT = "main"
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Settings:
    """What a command works with. `token_from` says where a token that wasn't just typed came from."""

    url: str
    token: str
    project: str
    token_from: str


def tokens_page(url: str) -> str:
    """Where the people of the server at `url` make their API tokens."""
    return f"{url}/account/tokens/"


def config_path() -> Path:
    """Where `login` keeps its answers."""
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / "dstackweb" / "config.toml"


def normal_url(text: str) -> str:
    """An address as it is stored: with a scheme (http only for this machine, when none is given), no trailing slash.

    Raises UsageError for anything that is no http(s) address.
    """
    text = text.strip()
    if "://" not in text:
        host = urlsplit(f"//{text}").hostname
        text = f"{'http' if host in LOOPBACK else 'https'}://{text}"
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 0) >= 0
    except ValueError:
        usable = False
    if not usable:
        raise UsageError(f"{text!r} is no address of a server.", f"It looks like {DEFAULT_URL}.")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"


def is_token(text: str) -> bool:
    """Whether a header can carry it; what the server makes of it is the server's to say."""
    return bool(text) and text.isascii() and text.isprintable() and " " not in text


def is_exposed(url: str) -> bool:
    """Whether a token sent to this address crosses a network unencrypted."""
    parts = urlsplit(url)
    return parts.scheme == "http" and parts.hostname not in LOOPBACK


def stored() -> dict[str, str]:
    """What `login` stored; empty when it never ran. Raises CliError when the file can't be read."""
    path = config_path()
    try:
        data = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CliError(f"can't read {path}: {error}", "dstackweb login URL writes it anew.") from None
    return {key: value for key, value in data.items() if isinstance(value, str)}


def load() -> Settings:
    """The settings of this call. Raises UsageError when nobody logged in, or a stored token would go astray."""
    saved, env = stored(), os.environ
    url = normal_url(env.get("DSTACKWEB_URL") or saved.get("url") or DEFAULT_URL)
    same_server = url == saved.get("url")
    token, token_from = env.get("DSTACKWEB_TOKEN", ""), "DSTACKWEB_TOKEN"
    if not token and saved.get("token"):
        if not same_server:
            raise UsageError(
                f"DSTACKWEB_URL is {url}, but the stored token is for {saved.get('url')}; it was not sent.",
                f"Set DSTACKWEB_TOKEN as well, or: dstackweb login {url}",
            )
        token, token_from = saved["token"], str(config_path())
    if not token:
        raise UsageError("not logged in.", f"dstackweb login {url}    (or set DSTACKWEB_URL and DSTACKWEB_TOKEN)")
    if not is_token(token):
        raise UsageError(f"the token from {token_from} is no API token.")
    project = env.get("DSTACKWEB_PROJECT") or (saved.get("project") if same_server else None) or DEFAULT_PROJECT
    return Settings(url, token, project, token_from)


def store(url: str, token: str, project: str) -> Path:
    """Keep the settings for later calls, readable by this user alone; the old file stays whole until the new one is.

    Raises CliError when the file can't be written.
    """
    path = config_path()
    # A JSON string is also a TOML basic string, but for DEL, which no token, address or project holds.
    lines = [
        f"{key} = {json.dumps(value, ensure_ascii=False)}\n"
        for key, value in (("url", url), ("token", token), ("project", project))
    ]
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=".config-")  # made with 0600
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
    """Remove what `login` stored; False when there was nothing."""
    try:
        config_path().unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise CliError(f"can't remove {config_path()}: {error.strerror}") from None
    return True
