"""What an admin sets for a Dask backend."""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Annotated, Any

from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop
from pydantic import AfterValidator, Field, SecretStr

from dstackweb.backends.clusters import PROJECTS
from dstackweb.backends.dask.wire import Tls
from dstackweb.lib.errors import Invalid
from dstackweb.spec.fields import Keys, Text, key
from dstackweb.spec.units import parse_memory

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")]
_PEM = re.compile(r"-----BEGIN ([A-Z ]+)-----(.*?)-----END \1-----", re.DOTALL)


@dataclass(frozen=True)
class Gpu:
    """A resource of workers that counts GPUs; 0 MiB if their memory is not known."""

    resource: str
    name: str
    memory_mib: int = 0


def gpus(lines: Sequence[str]) -> list[Gpu]:
    """GPUs of lines such as `GPU`, `GPU=A100` and `GPU=A100:80GB`. Raises ValueError."""
    found = []
    for line in lines:
        resource, _sep, about = line.partition("=")
        name, _sep, memory = about.partition(":")
        if not resource.strip():
            raise ValueError(_("`%(line)s` names no resource") % {"line": line})
        found.append(
            Gpu(resource.strip(), (name or resource).strip().upper(), parse_memory(memory.strip()) if memory else 0)
        )
    return found


def _gpu_lines(lines: tuple[str, ...]) -> tuple[str, ...]:
    gpus(lines)
    return lines


def pem(text: str) -> str:
    """PEM with its line breaks, which fields of one line lose. Raises ValueError."""
    parts = _PEM.findall(text)
    if not parts:
        raise ValueError(_("no PEM: it begins with -----BEGIN"))
    return "".join(
        f"-----BEGIN {name}-----\n{fill(''.join(body.split()), 64)}\n-----END {name}-----\n" for name, body in parts
    )


class DaskSettings(Keys):
    """Flat, as the form and the API show them."""

    projects: Annotated[tuple[Name, ...], Field(min_length=1, max_length=100)] = key(*PROJECTS)
    scheduler: Annotated[str, Field(pattern=r"^(tcp|tls)://([\w.-]+|\[[0-9a-fA-F:]+\]):\d{1,5}$")] = key(
        gettext_noop("an address such as tcp://dask.example:8786"),
        gettext_noop("Address of the scheduler; tls:// needs the certificates below"),
    )
    gpus: Annotated[tuple[Text, ...], AfterValidator(_gpu_lines)] = key(
        gettext_noop("a list such as GPU=A100:80GB"),
        gettext_noop("Resources of workers that count GPUs, with model and memory, which Dask does not know"),
        default=("GPU",),
        title=gettext_noop("GPUs"),
    )
    tls_ca: Annotated[str, AfterValidator(pem)] | None = key(
        gettext_noop("a certificate in PEM"),
        gettext_noop("Certificate of the cluster's CA"),
        default=None,
        title=gettext_noop("TLS CA"),
    )
    tls_cert: Annotated[str, AfterValidator(pem)] | None = key(
        gettext_noop("a certificate in PEM"),
        gettext_noop("Certificate of this client"),
        default=None,
        title=gettext_noop("TLS certificate"),
    )
    tls_key: SecretStr | None = key(
        gettext_noop("a key in PEM"),
        gettext_noop("Private key of this client"),
        default=None,
        title=gettext_noop("TLS key"),
    )


def tls(config: Mapping[str, Any], secrets: Mapping[str, str]) -> Tls | None:
    """The certificates, where the address is tls://. Raises Invalid unless they are complete and fit together."""
    if not str(config.get("scheduler", "")).startswith("tls://"):
        return None
    texts = {**config, **secrets}
    for name in ("tls_ca", "tls_cert", "tls_key"):
        if not texts.get(name):
            raise Invalid.at(name, msg=_("`%(name)s` is needed for tls://") % {"name": name})
    try:
        found = Tls(pem(texts["tls_ca"]), pem(texts["tls_cert"]), pem(texts["tls_key"]))
        found.context()
    except (ssl.SSLError, ValueError, OSError) as error:
        raise Invalid.at(
            "tls_key", msg=_("`tls_key` and the certificates do not fit together: %(error)s") % {"error": error}
        ) from error
    return found
