"""The keys of a run file that are about its container: what its texts may be."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Iterable
from typing import Annotated

from pydantic import AfterValidator

from dstackweb.lib.language import gettext as _
from dstackweb.spec.env import bad_references, refers_to_secret
from dstackweb.spec.fields import Text

MAX_IMAGE, MAX_VOLUME, MOST_VOLUMES = 500, 1000, 20
NEEDS_IMAGE = ("entrypoint", "pull_policy", "registry_auth", "volumes")
"""Keys that mean nothing without an image."""
_IMAGE = re.compile(
    r"((localhost|[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+|\[[0-9A-Fa-f:]+\]|[A-Za-z0-9-]+(?=:\d+/))(:\d+)?/)?"
    r"[a-z0-9]+(([._]|__|-+)[a-z0-9]+)*(/[a-z0-9]+(([._]|__|-+)[a-z0-9]+)*)*"
    r"(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@sha(256|384|512):[0-9a-f]{64,128})?"
)
"""Registry, repository, tag and digest."""
_FOLDER = re.compile(r"/[^\0-\x1f\x7f:,\"']*")
_KERNELS = ("/proc", "/sys", "/dev")


def check_image(image: str) -> str:
    """A name that registries know. Engines take others for options, ids, or for files of the host (`dir:/etc`)."""
    if len(image) > MAX_IMAGE:
        raise ValueError(_("it has more than %(max_image)s characters") % {"max_image": MAX_IMAGE})
    if not _IMAGE.fullmatch(image):
        raise ValueError(_("%(image)s is not valid") % {"image": repr(image)})
    return image


def check_entrypoint(text: str) -> str:
    """A program and its arguments, quoted as in a shell."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(_("it can't be split into words: %(error)s") % {"error": error}) from None
    if not words or not words[0] or words[0].startswith("-"):
        raise ValueError(_("it does not begin with a program"))
    return text


def check_volume(text: str) -> str:
    """`/host/folder:/container/folder`, with `:ro` or `:rw` or without."""
    if len(text) > MAX_VOLUME:
        raise ValueError(_("it has more than %(max_volume)s characters") % {"max_volume": MAX_VOLUME})
    host, _sep, rest = text.partition(":")
    inside, _sep, mode = rest.partition(":")
    if mode not in ("", "ro", "rw") or text.endswith(":"):
        raise ValueError(_("%(text)s does not end with a folder, :ro or :rw") % {"text": repr(text)})
    for folder in (host, inside):
        if not _FOLDER.fullmatch(folder):
            raise ValueError(
                _("%(folder)s is not an absolute path without colons, commas and quotes") % {"folder": repr(folder)}
            )
        if posixpath.normpath(folder).lstrip("/") != folder.strip("/") or folder.strip("/") == "":
            raise ValueError(_("%(folder)s is / or has parts such as . and ..") % {"folder": repr(folder)})
    if any(inside == top or inside.startswith(f"{top}/") for top in _KERNELS):
        raise ValueError(_("%(inside)s is the container's own") % {"inside": repr(inside)})
    return text


def is_listed(volume: str, listed: Iterable[str]) -> bool:
    """Whether a host that lists these folders may mount a volume, going by names. The host itself follows links."""
    asked, _, rest = volume.partition(":")
    for entry in listed:
        folder, _, mode = entry.partition(":")
        if f"{asked.rstrip('/')}/".startswith(f"{folder.rstrip('/')}/") and (mode == "rw" or not rest.endswith(":rw")):
            return True
    return False


def check_name(text: str) -> str:
    """Text that may refer to secrets of the project."""
    for reference in bad_references(text):
        raise ValueError(
            _("%(reference)s is not supported; only ${{ secrets.NAME }} is") % {"reference": reference[:100]}
        )
    return text


def check_password(text: str) -> str:
    """A reference to a secret: the file is stored, and shown to all of the project."""
    if not refers_to_secret(text):
        raise ValueError(_("a password in the file could be read by all; set a secret of the project"))
    return check_name(text)


Image = Annotated[Text, AfterValidator(check_image)]
Entrypoint = Annotated[Text, AfterValidator(check_entrypoint)]
Volume = Annotated[Text, AfterValidator(check_volume)]
Username = Annotated[Text, AfterValidator(check_name)]
Password = Annotated[Text, AfterValidator(check_password)]
