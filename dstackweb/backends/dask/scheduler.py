"""Questions to a Dask scheduler. Anyone may answer: answers are plain data, checked against their types."""

from __future__ import annotations

import hashlib
import pickle
import ssl
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from dstackweb.backends.contract import SourceFailed, SourceFailure
from dstackweb.backends.dask.wire import Line, ProtocolError, Tls

T = TypeVar("T")
NEEDS = "2025.4"
"""The oldest `distributed` whose graphs `on_scheduler` can make."""
LOAD = "exec(fit, space) or exec(on_scheduler, space) or space['install']"


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
        try:
            with Line(self.address, self.tls) as line:
                message = {"op": operation(), "ask": what, "data": data}
                answer = line.call(message)
                if answer is None:  # a scheduler that does not know this version
                    self._install(line)
                    answer = line.call(message)
        except (OSError, ProtocolError, ssl.SSLError, ValueError) as error:
            raise self._unreachable(str(error)) from error
        if not isinstance(answer, dict) or "answer" not in answer:
            raise SourceFailed(SourceFailure.SERVICE_ERROR, text=_failure(answer))
        try:
            return TypeAdapter(into).validate_python(answer["answer"])
        except ValidationError as error:
            raise self._unreachable("no answer of a scheduler") from error

    def _install(self, line: Line) -> None:
        texts = {"op": operation(), "on_worker": _text("on_worker")}
        done = line.call(
            {"op": "run_function", "function": pickle.dumps(Code(), 4), "kwargs": pickle.dumps(texts, 4), "wait": True}
        )
        if not isinstance(done, dict) or done.get("status") != "OK":
            raise SourceFailed(SourceFailure.SERVICE_ERROR, text=_failure(done))

    def _unreachable(self, text: str) -> SourceFailed:
        return SourceFailed(SourceFailure.UNREACHABLE, endpoint=self.address, text=text[:300])


def _failure(answer: Any) -> str:
    if not isinstance(answer, dict):
        return "the scheduler gave no answer"
    said = str(answer.get("failed") or answer.get("exception_text") or "the scheduler failed")[:300]
    found = answer.get("distributed")
    return f"{said} (it has distributed {found}, needed is {NEEDS} or newer)" if found else said
