"""`${{ secrets.NAME }}` in `env` values: which secrets a run needs, and filling them in."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from dstackweb.lib.errors import Invalid

_REFERENCE = re.compile(r"\$\{\{\s*secrets\.([A-Za-z_][A-Za-z0-9_]*)\s*\}\}", re.ASCII)
_ANY = re.compile(r"\$\{\{.*?(?:\}\}|\Z)", re.DOTALL)
_OF_SECRETS = re.compile(r"\$\{\{\s*secrets\.")


def secret_names(env: Mapping[str, str]) -> set[str]:
    """The project secrets that an environment refers to."""
    return {name for value in env.values() for name in _REFERENCE.findall(value)}


def fill_secrets(env: Mapping[str, str], secrets: Mapping[str, str]) -> dict[str, str]:
    """The environment with all references replaced. Raises Invalid with the names of missing secrets."""
    missing = sorted(secret_names(env) - set(secrets))
    if missing:
        raise Invalid.at("env", msg=f"the project has no secret {', '.join(missing)}")
    return {key: _REFERENCE.sub(lambda found: secrets[found[1]], value) for key, value in env.items()}


def bad_references(value: str) -> Iterator[str]:
    """The `${{ … }}` in an `env` value that don't refer to a secret."""
    return (found for found in _ANY.findall(value) if not _REFERENCE.fullmatch(found))


def refers_to_secret(text: str) -> bool:
    """Whether a text refers to a secret; only in `env` is it filled in."""
    return bool(_OF_SECRETS.search(text))
