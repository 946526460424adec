"""Images of containers: how they are pulled, what is known of one that is there, and who may use it."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from dstackweb.runner.engine import Engine, EngineAway, EngineError, error_of

CREDENTIALS = "registry"
LINE_S = 2.0
"""How often the progress of a pull is written at most."""
HUB = "docker.io"
DOCKER_HUB = {"docker": "https://index.docker.io/v1/", "podman": HUB}
TRANSPORT = {"docker": "", "podman": "docker://"}
"""Podman takes names for files where they look like these, and archives name their images as they like."""
_LAYER = re.compile(r"([0-9a-f]{12}): (.+)")
_DONE = ("Pull complete", "Already exists")


class ImageFault(str, Enum):  # noqa: UP042 - Python 3.9 has no StrEnum
    """Why an image could not be pulled."""

    NOT_FOUND = "not_found"
    DENIED = "denied"
    NO_SPACE = "no_space"
    UNREACHABLE = "unreachable"
    NOT_PRESENT = "not_present"
    FAILED = "failed"


_SIGNS = (
    (ImageFault.NO_SPACE, ("no space left on device", "disk quota exceeded")),
    (ImageFault.DENIED, ("denied", "unauthorized", "authentication required", "no basic auth", "forbidden",
                         "incorrect username or password")),
    (ImageFault.NOT_FOUND, ("manifest unknown", "not found", "no such image", "repository name not known",
                            "name unknown", "invalid reference format")),
    (ImageFault.UNREACHABLE, ("connection refused", "no such host", "timeout", "unreachable", "deadline exceeded",
                              "server gave http response", "no route to host", "connection reset", "eof", "x509",
                              "temporary failure in name resolution", "server misbehaving", "bad gateway",
                              "service unavailable")),
)  # fmt: skip
"""Words of the engines and registries, the first that occur count."""


MAYBE_OF_ENGINE = (ImageFault.NO_SPACE, ImageFault.FAILED)
"""Faults that an image may have alone, or all containers of the host."""


class PullFailed(Exception):
    """The image could not be had; the message is the engine's."""

    def __init__(self, fault: ImageFault, image: str, text: str) -> None:
        super().__init__(text)
        self.fault, self.image = fault, image


@dataclass(frozen=True)
class Image:
    """An image on this machine: `id` to make containers of, `digest` as registries know it, or the id."""

    id: str
    digest: str


def find(engine: Engine, image: str) -> Image | None:
    """The image of just this name; None if there is none. Raises EngineAway, EngineError.

    Engines also take beginnings of ids, and Podman the end of a name, which may be another registry's.
    """
    name = full_name(image)
    try:
        (found,) = json.loads(engine.call("image", "inspect", name))
    except EngineAway:
        raise
    except EngineError as error:
        if "no such" in str(error).lower() or "not known" in str(error).lower():
            return None
        raise
    digests = [str(one) for one in found.get("RepoDigests") or ()]
    known = [*digests, *(str(tag) for tag in found.get("RepoTags") or ())]
    if name not in map(full_name, known):
        return None
    own = [one for one in digests if repository_of(one) == _repository(name)]
    image_id = str(found["Id"])
    image_id = image_id if image_id.startswith("sha256:") else f"sha256:{image_id}"
    return Image(image_id, next(iter(own), image_id)[:300])


def full_name(image: str) -> str:
    """An image's name with its registry, and its digest or tag: Docker Hub and `latest` where there are none."""
    name, _, digest = image.partition("@")
    repository = _repository(name)
    end = f"@{digest}" if digest else name.removeprefix(repository) or ":latest"
    first, slash, rest = repository.partition("/")
    if not (slash and ("." in first or ":" in first or first == "localhost")):
        first, rest = HUB, repository
    if first in (HUB, f"index.{HUB}"):
        first, rest = HUB, rest if "/" in rest else f"library/{rest}"
    return f"{first}/{rest}{end}"


def repository_of(image: str) -> str:
    return _repository(full_name(image))


def _repository(image: str) -> str:
    """The image's name without tag and digest."""
    head, slash, last = image.partition("@")[0].rpartition("/")
    return f"{head}{slash}{last.partition(':')[0]}"


def fault_of(text: str) -> ImageFault:
    lower = text.lower()
    return next((fault for fault, signs in _SIGNS if any(sign in lower for sign in signs)), ImageFault.FAILED)


def registry_of(engine: str, image: str) -> str:
    """Where credentials for an image belong."""
    registry = full_name(image).partition("/")[0]
    return DOCKER_HUB[engine] if registry == HUB else registry


class Pull:
    """A pull under way. Credentials are in a private folder of its own until `close`, never in arguments."""

    def __init__(self, engine: Engine, image: str, auth: Mapping[str, str] | None, folder: str) -> None:
        self._engine, self._image = engine, image
        self._config = os.path.join(folder, CREDENTIALS)
        forget_credentials(folder)
        os.mkdir(self._config, 0o700)
        _write_credentials(os.path.join(self._config, "config.json"), registry_of(engine.name, image), auth)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - until `close`
        self._process = subprocess.Popen(
            [engine.program, "pull", "--", TRANSPORT[engine.name] + full_name(image)], stdin=subprocess.DEVNULL,
            env=engine.environment(self._config), stdout=subprocess.PIPE, stderr=self._errors, cwd="/",
            start_new_session=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._layers: dict[str, bool] = {}
        self._rest = b""
        self._next_line = 0.0
        self._shown = (0, 0)

    def is_done(self) -> bool:
        """Whether the pull has ended well. Raises PullFailed, EngineAway."""
        if self._process.poll() is None:
            return False
        if self._process.returncode:
            self._errors.seek(0)
            text = self._errors.read(1 << 16).decode(errors="replace")
            error = error_of(self._engine.name, text, self._process.returncode)
            if (
                isinstance(error, EngineAway)
                and "daemon" in text.lower()
                and "response from daemon" not in text.lower()
            ):
                raise error
            raise PullFailed(fault_of(str(error)), self._image, str(error))
        return True

    def progress(self) -> Iterator[str]:
        """Lines for the log: how many layers are there."""
        assert self._process.stdout is not None
        self._rest += self._process.stdout.read(1 << 16) or b""
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            if found := _LAYER.match(line.decode(errors="replace").strip()):
                self._layers[found[1]] = self._layers.get(found[1], False) or found[2].startswith(_DONE)
        now, count = time.monotonic(), (sum(self._layers.values()), len(self._layers))
        if count != self._shown and now >= self._next_line:
            self._shown, self._next_line = count, now + LINE_S
            yield f"{count[0]} of {count[1]} layers"

    def close(self) -> None:
        """End it, and remove the credentials."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()
        shutil.rmtree(self._config, ignore_errors=True)


def forget_credentials(folder: str) -> None:
    """Remove those of a pull whose runner was killed."""
    shutil.rmtree(os.path.join(folder, CREDENTIALS), ignore_errors=True)


def _write_credentials(path: str, registry: str, auth: Mapping[str, str] | None) -> None:
    """As `login` would, which may hand them to a keychain of the machine instead. Podman wants the file in any case."""
    stored: dict[str, Any] = {"auths": {}}
    if auth:
        text = base64.b64encode(f"{auth['username']}:{auth['password']}".encode()).decode()
        stored["auths"][registry] = {"auth": text}
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        json.dump(stored, file)


class ImageAccess:
    """Which projects may use an image that is on this machine: engines ask its registry only when it is pulled.

    An image that came with a project's credentials is for the projects whose credentials its registry took; for others
    it is not there, so that they ask the registry too. One that was there before, or came without any, is for all. So
    is one that is asked for by its digest: no one guesses it, and engines don't ask the registry for what they have by
    digest. `home` has the folder of jobs, and is private.
    """

    def __init__(self, home: str) -> None:
        self._folder = os.path.join(home, "images")

    def allows(self, image: str, image_id: str, project: int) -> bool:
        """Whether a project may use an image by this name without asking its registry."""
        place = self._place(image, image_id)
        return "@" in image or not os.path.isdir(place) or os.path.exists(os.path.join(place, str(project)))

    def note(self, image: str, image_id: str, project: int, *, with_credentials: bool, was_there: bool) -> None:
        """A project has pulled an image; `was_there`: it was on this machine before. Raises OSError."""
        place = self._place(image, image_id)
        if with_credentials and (os.path.isdir(place) or not was_there):
            os.makedirs(place, mode=0o700, exist_ok=True)
            with open(os.path.join(place, str(project)), "w", encoding="ascii"):
                pass
        elif not with_credentials and "@" not in image:
            shutil.rmtree(place, ignore_errors=True)

    def _place(self, image: str, image_id: str) -> str:
        """A folder for an image of a repository, whatever its tag: in another one the same image may be for all."""
        name = f"{repository_of(image)} {image_id}"
        return os.path.join(self._folder, hashlib.sha256(name.encode()).hexdigest())
