"""Dask's comm protocol, spoken by us, and what anybody may answer."""

from __future__ import annotations

import contextlib
import io
import pickle
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
from distributed.protocol import dumps, loads, to_serialize
from distributed.protocol.utils import pack_frames
from hypothesis import given, strategies as st
from pydantic import TypeAdapter, ValidationError

from dstackweb.backends.contract import InstanceOrder, SourceFailed, SourceFailure, SourceKey
from dstackweb.backends.dask.kind import DaskBackend, Row, Worker
from dstackweb.backends.dask.scheduler import MAX_BYTES, Code, ProtocolError, Scheduler, pack, read
from dstackweb.backends.models import Backend
from tests.support import examples

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


class Bomb:
    """Unpickled, it ends the test."""

    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.exit, ("a pickle was loaded",)


def heard(data: bytes) -> Any:
    """What `read` makes of these bytes; the end of them is the end of the connection."""
    stream = io.BytesIO(data)

    def receive(count: int) -> bytes:
        if len(found := stream.read(count)) < count:
            raise ConnectionResetError("the connection was closed")
        return found

    return read(receive)


def said(*frames: bytes) -> bytes:
    """Frames as Dask sends them."""
    body = pack_frames(frames)
    return struct.pack("<Q", len(body)) + body


@given(st.dictionaries(st.text(), PLAIN))
def test_dask_reads_what_we_write(message: dict[str, Any]) -> None:
    packed = pack(message)
    (length,) = struct.unpack_from("<Q", packed)
    assert length == len(packed) - 8
    (size,) = struct.unpack_from("<Q", packed, 16)
    assert loads([packed[24:]]) == loads([msgpack.packb(message)])
    assert size == len(packed) - 24


@given(st.dictionaries(st.text(), PLAIN))
def test_we_read_what_dask_writes(message: dict[str, Any]) -> None:
    frames = [bytes(frame) for frame in dumps({"status": "OK", "of": message, "result": to_serialize(Bomb())})]
    found = heard(said(*frames))
    assert (found["status"], found["of"]) == ("OK", message)
    assert set(found["result"]) == {"__Serialized__"}, "what is pickled stays where it is"


@examples(500)
@given(st.binary(max_size=200) | st.lists(st.binary(max_size=60), max_size=4).map(lambda frames: said(*frames)))
def test_no_bytes_make_it_fail_otherwise(data: bytes) -> None:
    with contextlib.suppress(ProtocolError, ConnectionResetError):
        heard(data)


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<QQ", 2**40, 1) + struct.pack("<Q", 2**40),
        struct.pack("<QQ", 16, 2**60),
        struct.pack("<QQ", 8, 0),
        struct.pack("<QQQ", 16, 1, MAX_BYTES + 1),
        said(b"\x91" * 100_000 + b"\xc0"),
        said(b"\xdf\xff\xff\xff\xff"),
        said(b"\x81\x90\x01"),
        said(b"\xc1"),
        said(b"\xd6\xff\x00\x00\x00\x00\x00"),
        said(pickle.dumps(Bomb())),
    ],
    ids=["large", "many frames", "no frame", "large frame", "deep", "long map", "a list as key", "unused", "left over",
         "a pickle"],
)  # fmt: skip
def test_bad_messages_are_refused_before_they_cost_anything(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        heard(data)


def test_the_code_that_is_sent_needs_nothing_of_ours() -> None:
    names = [text for _code, text, _at in __import__("pickletools").genops(pickle.dumps(Code(), 4)) if text]
    assert [name for name in names if isinstance(name, str) and len(name) < 20][:2] == ["builtins", "eval"]


@pytest.fixture
def anybody() -> Iterator[tuple[str, list[bytes]]]:
    """An address at which each message is answered by the next of these bytes, until there are no more."""
    answers: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with listener.accept()[0] as line:
                while answers:
                    line.recv(65536)
                    line.sendall(answers.pop(0))
                # Closed with bytes unread, the connection would be reset before its last answer is read.
                with contextlib.suppress(OSError):
                    line.shutdown(socket.SHUT_WR)
                    while line.recv(65536):
                        continue

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}", answers


HELLO = pack({"compression": None, "python": [3, 11, 0], "pickle-protocol": 5})


@pytest.mark.parametrize(
    ("answers", "code", "text"),
    [
        ([b"HTTP/1.1 400 Bad Request\r\n\r\n"], SourceFailure.UNREACHABLE, "frames"),
        ([pack({"ssh": 2})], SourceFailure.UNREACHABLE, "no scheduler of Dask"),
        ([HELLO], SourceFailure.UNREACHABLE, "closed"),
        ([HELLO, pack({"answer": [{"name": "w"}]})], SourceFailure.NONSENSE, "no answer of a scheduler"),
        ([HELLO, pack({"answer": "many"})], SourceFailure.NONSENSE, "no answer of a scheduler"),
        ([HELLO, pack({"failed": "No", "distributed": "2024.1"})], SourceFailure.SERVICE_ERROR, "2024.1"),
        ([HELLO, said(b"\xc0"), pack({"status": "error", "exception_text": "disallowed"})],
         SourceFailure.SERVICE_ERROR, "disallowed"),
    ],
)  # fmt: skip
def test_other_answers_are_no_answer(
    anybody: tuple[str, list[bytes]], answers: list[bytes], code: SourceFailure, text: str
) -> None:
    address, given_here = anybody
    given_here += answers
    with pytest.raises(SourceFailed) as failed:
        Scheduler(address).ask("workers", list[Worker])
    assert (failed.value.code, text in failed.value.data["text"]) == (code, True), failed.value


WORKER = {
    "name": "w", "threads": 4, "tasks": 0, "cpus_used": 0, "memory_mib": 1024, "memory_used_mib": 0,
    "resources": {"GPU": 2.0}, "resources_used": {"GPU": 1.0}, "running": True,
}  # fmt: skip
ROW = {"key": "k", "instance": "u-1", "host": "h", "at": 1795487535.0, "why": "", "text": "", "state": "running"}


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf"), 1e300])
def test_a_number_that_is_none_is_no_answer(anybody: tuple[str, list[bytes]], number: float) -> None:
    for kind, right, wrong in (
        (list[Worker], WORKER, WORKER | {"resources": {"GPU": number}}),
        (list[Worker], WORKER, WORKER | {"resources_used": {"GPU": number}}),
        (list[Row], ROW, ROW | {"at": number}),
    ):
        TypeAdapter[Any](kind).validate_python([right])
        with pytest.raises(ValidationError):
            TypeAdapter[Any](kind).validate_python([wrong])
    address, given_here = anybody
    given_here += [HELLO, pack({"answer": [ROW | {"at": number}]})]
    with pytest.raises(SourceFailed, match="no answer of a scheduler"):
        Scheduler(address).ask("instances", list[Row])


def test_a_worker_that_makes_no_sense_is_left_out_unless_it_is_the_only_one(
    anybody: tuple[str, list[bytes]],
) -> None:
    address, given_here = anybody
    given_here += [HELLO, pack({"answer": [WORKER, {"name": "x"}, None, WORKER | {"threads": "many"}]})]
    scheduler = DaskBackend(Backend(config={"scheduler": address}))
    assert scheduler.fetch(SourceKey("workers", "")) == [WORKER]


@pytest.mark.parametrize("answer", [[{"name": "x"}, 5], None, "many", {}])
def test_workers_of_which_none_can_be_read_are_no_answer(anybody: tuple[str, list[bytes]], answer: Any) -> None:
    address, given_here = anybody
    given_here += [HELLO, pack({"answer": answer})]
    with pytest.raises(SourceFailed, match="nonsense"):
        DaskBackend(Backend(config={"scheduler": address})).fetch(SourceKey("workers", ""))


@pytest.mark.parametrize("part", [{}, {"key": "k"}, {name: ROW[name] for name in ("key", "instance", "state")}])
def test_an_order_gets_a_whole_row_or_a_refusal(
    anybody: tuple[str, list[bytes]], settings: Any, part: dict[str, Any]
) -> None:
    settings.DSTACKWEB_SHARED_UID = True
    address, given_here = anybody
    given_here += [HELLO, pack({"answer": part})]
    with pytest.raises(SourceFailed, match="no answer of a scheduler"):
        DaskBackend(Backend(config={"scheduler": address})).launch(
            InstanceOrder("u-1", "mine", "cluster", "cpu", False, "")
        )
