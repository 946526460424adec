"""Questions to a Dask scheduler, by its comm protocol: frames of msgpack over TCP or TLS. Anyone may answer: nothing
that arrives is ever unpickled, and answers are checked against their types."""

from __future__ import annotations

import hashlib
import os
import pickle
import socket
import ssl
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pydantic import TypeAdapter, ValidationError

from dstackweb.backends import api_calls
from dstackweb.backends.api_calls import Api
from dstackweb.backends.clusters import unreachable
from dstackweb.backends.contract import NonsenseAnswer, SourceFailed, SourceFailure, nonsense

try:
    import msgpack
except ImportError:  # only a server with a Dask backend needs it
    msgpack = None

T = TypeVar("T")
NEEDS = "2025.4"
"""The oldest `distributed` whose graphs `on_scheduler` can make."""
LOAD = "exec(fit, space) or exec(on_scheduler, space) or space['install']"
MAX_BYTES, MAX_FRAMES = 16 * 2**20, 64
"""Of a message. The largest one lists all workers, with less than 1 KB each."""
CONNECT_S, ANSWER_S = 5.0, 20.0
NOT_INSTALLED = "not_installed"
"""The code of SourceFailed where the server lacks msgpack."""
HANDSHAKE = {"compression": None, "python": (3, 11, 0), "pickle-protocol": 4}
"""What both sides say first. Without compression of ours the other side does without."""


def is_installed() -> bool:
    """Whether the server has the extra `dask-backend`."""
    return msgpack is not None


class Code:
    """Pickles as the function `install`, made by the scheduler from texts: it needs nothing but Python's own `eval`."""

    def __reduce__(self) -> tuple[Any, ...]:
        texts = {name: _text(name) for name in ("fit", "on_scheduler")}
        return eval, (LOAD, {**texts, "space": {"__name__": "dstackweb"}})


@cache
def _text(module: str) -> str:
    return (files("dstackweb.backends.dask") / f"{module}.py").read_text(encoding="utf-8")


@cache
def operation() -> str:
    """The name of our messages: another one for each version of the code."""
    texts = "".join(map(_text, ("fit", "on_scheduler", "on_worker")))
    return f"dstackweb-{hashlib.sha256(texts.encode()).hexdigest()[:16]}"


@dataclass(frozen=True)
class Scheduler:
    """A scheduler by its address. Each question is a connection of its own, since they are seconds apart."""

    address: str
    tls: Tls | None = None

    def ask(self, what: str, into: type[T], **data: Any) -> T:
        """An answer of the type. Raises SourceFailed whenever there is none."""
        if not is_installed():
            raise SourceFailed(NOT_INSTALLED)
        try:
            with api_calls.request(Api("dask", what, self.address)), Line(self.address, self.tls) as line:
                message = {"op": operation(), "ask": what, "data": data}
                answer = line.call(message)
                if answer is None:  # a scheduler that does not know this version
                    self._install(line)
                    answer = line.call(message)
        except (OSError, ProtocolError, ssl.SSLError, ValueError) as error:
            raise unreachable(self.address, str(error)) from error
        if not isinstance(answer, dict) or "answer" not in answer:
            raise SourceFailed(SourceFailure.SERVICE_ERROR, text=_failure(answer))
        try:
            return TypeAdapter(into).validate_python(answer["answer"])
        except ValidationError as error:
            raise nonsense(self.address, text="no answer of a scheduler") from error

    def ask_each(self, what: str, into: type[T], **data: Any) -> list[T]:
        """Ask for a list of this type; items of another type are left out, unless all are. Raises as `ask`."""
        answer = self.ask(what, list[Any], **data)
        adapter, items = TypeAdapter(into), []
        for item in answer:
            with suppress(ValidationError):
                items.append(adapter.validate_python(item))
        if answer and not items:
            raise nonsense(self.address, NonsenseAnswer.ITEMS)
        return items

    def _install(self, line: Line) -> None:
        texts = {"op": operation(), "on_worker": _text("on_worker")}
        done = line.call(
            {"op": "run_function", "function": pickle.dumps(Code(), 4), "kwargs": pickle.dumps(texts, 4), "wait": True}
        )
        if not isinstance(done, dict) or done.get("status") != "OK":
            raise SourceFailed(SourceFailure.SERVICE_ERROR, text=_failure(done))


def _failure(answer: Any) -> str:
    if not isinstance(answer, dict):
        return "the scheduler gave no answer"
    said = str(answer.get("failed") or answer.get("exception_text") or "the scheduler failed")[:300]
    found = answer.get("distributed")
    return f"{said} (it has distributed {found}, needed is {NEEDS} or newer)" if found else said


class ProtocolError(Exception):
    """What answers does not speak Dask's protocol, or says too much."""


def pack(message: Mapping[str, Any]) -> bytes:
    """A message as bytes: the length of what follows, the number of frames, their lengths, the frames."""
    frame: bytes = msgpack.packb(message)
    return struct.pack("<QQQ", 16 + len(frame), 1, len(frame)) + frame


def read(receive: Callable[[int], bytes]) -> Any:
    """The next message. `receive` gives just so many bytes. Raises ProtocolError, and what `receive` raises.

    Frames after the first are pickles or binary data: they are read, and dropped.
    """
    together, count = struct.unpack("<QQ", receive(16))
    if not 1 <= count <= MAX_FRAMES:
        raise ProtocolError(f"a message of {count} frames")
    lengths = struct.unpack(f"<{count}Q", receive(8 * count))
    if sum(lengths) > MAX_BYTES or together > MAX_BYTES:
        raise ProtocolError(f"a message of {sum(lengths)} bytes")
    first = receive(lengths[0])
    receive(sum(lengths[1:]))
    try:
        return msgpack.unpackb(first, strict_map_key=False)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"no message: {type(error).__name__}") from error


@dataclass(frozen=True)
class Tls:
    """PEM texts: the cluster's CA, and a certificate with its key for clients."""

    ca: str
    cert: str
    key: str = field(repr=False)

    def context(self) -> ssl.SSLContext:
        """As Dask's own: the CA is the cluster's, so names of hosts don't matter. Raises ssl.SSLError, ValueError."""
        made = ssl.create_default_context(cadata=self.ca)
        made.check_hostname = False
        file = os.memfd_create("dask-tls")  # Python reads certificates from files only
        try:
            os.write(file, f"{self.cert}\n{self.key}\n".encode())
            made.load_cert_chain(f"/proc/self/fd/{file}")
        finally:
            os.close(file)
        return made


class Line:
    """A connection to a scheduler, `tcp://host:port` or `tls://host:port`. Raises OSError and ProtocolError."""

    def __init__(self, address: str, tls: Tls | None = None, *, answer_s: float = ANSWER_S) -> None:
        self._ends = time.monotonic() + answer_s
        to = urlsplit(address)
        self._socket = socket.create_connection((to.hostname or "", to.port or 8786), min(CONNECT_S, answer_s))
        try:
            if to.scheme == "tls":
                if tls is None:
                    raise ProtocolError("tls:// needs certificates")
                self._socket = tls.context().wrap_socket(self._socket)
            self.remote = self.call(HANDSHAKE)
            if not isinstance(self.remote, dict) or "pickle-protocol" not in self.remote:
                raise ProtocolError("no scheduler of Dask")
        except BaseException:
            self._socket.close()
            raise

    def call(self, message: Mapping[str, Any]) -> Any:
        """Send a message, and return the next one that arrives."""
        self._socket.settimeout(self._left())
        self._socket.sendall(pack(message))
        return read(self._receive)

    def _receive(self, count: int) -> bytes:
        found = bytearray()
        while len(found) < count:
            self._socket.settimeout(self._left())
            part = self._socket.recv(min(count - len(found), 65536))
            if not part:
                raise ConnectionResetError("the connection was closed")
            found += part
        return bytes(found)

    def _left(self) -> float:
        left = self._ends - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        return left

    def __enter__(self) -> Line:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
