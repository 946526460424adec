from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstackweb.runner import shipper
from dstackweb.runner.redact import mask
from dstackweb.runner.shipper import Shipper, Stuck


class Server:
    """Takes pieces as the API does. It may lose its log's end, and answers to it may be lost on the way."""

    def __init__(self) -> None:
        self.log = b""
        self.lose_answer = False

    def take(self, offset: int, data: bytes) -> int:
        if offset > len(self.log):
            return len(self.log)
        self.log += data[len(self.log) - offset :]
        if self.lose_answer:
            raise ConnectionError
        return len(self.log)


def ship_all(sender: Shipper) -> None:
    """Until nothing is left to send; lost answers end it, as an unreachable API does."""
    try:
        while sender.ship():
            pass
    except ConnectionError:
        pass


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("grow"), st.lists(st.sampled_from(b"ab-"), max_size=20).map(bytes)),
        st.tuples(st.just("ship"), st.booleans()),
        st.tuples(st.just("restart"), st.none()),
        st.tuples(st.just("lose"), st.integers(0, 20)),
    ),
    max_size=25,
)


@given(STEPS, st.lists(st.text("ab-", max_size=5), max_size=3), st.integers(1, 9))
def test_the_log_becomes_the_masked_spool_whatever_was_lost_between(
    steps: list[tuple[str, object]], secrets: list[str], chunk: int
) -> None:
    """Restarts, lost answers and a server that lost bytes: no gap, no doubled byte, no secret, no tail left behind."""
    server = Server()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(shipper, "CHUNK", chunk)
        spool = Path(folder) / "spool"
        sender = Shipper(str(spool), secrets, server.take)
        for kind, value in steps:
            if kind == "grow":
                with spool.open("ab") as file:
                    file.write(value)  # type: ignore[arg-type]
            elif kind == "restart":
                sender = Shipper(str(spool), secrets, server.take, None)
            elif kind == "lose":
                server.log = server.log[: len(server.log) - int(value)]  # type: ignore[call-overload]
                sender = Shipper(str(spool), secrets, server.take)
            else:
                server.lose_answer = bool(value)
                ship_all(sender)
                whole = spool.read_bytes() if spool.exists() else b""
                assert mask(whole, [secret.encode() for secret in secrets]).startswith(server.log)
        server.lose_answer = False
        whole = spool.read_bytes() if spool.exists() else b""
        sender.end = len(whole)
        ship_all(sender)
        assert server.log == mask(whole, [secret.encode() for secret in secrets])


def test_a_piece_is_never_larger_than_the_server_likes(tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    spool.write_bytes(b"x" * (3 * shipper.CHUNK + 5))
    sizes: list[int] = []
    Shipper(str(spool), ["secret"], lambda offset, data: sizes.append(len(data)) or offset + len(data)).ship()  # type: ignore[func-returns-value]
    assert sizes == [shipper.CHUNK]


def test_a_successor_asks_how_much_has_arrived(tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    spool.write_bytes(os.urandom(10 * shipper.CHUNK))
    server = Server()
    server.log = spool.read_bytes()[:-7]
    offsets: list[int] = []

    def take(offset: int, data: bytes) -> int:
        offsets.append(offset)
        return server.take(offset, data)

    ship_all(Shipper(str(spool), [], take, None))
    assert offsets == [0, 10 * shipper.CHUNK - 7]
    assert server.log == spool.read_bytes()


def test_an_answer_that_goes_nowhere_is_not_repeated_at_full_speed(tmp_path: Path) -> None:
    (tmp_path / "spool").write_bytes(b"x")
    with pytest.raises(Stuck):
        Shipper(str(tmp_path / "spool"), [], lambda offset, data: offset).ship()


def test_what_may_be_the_beginning_of_a_secret_waits_for_what_follows(tmp_path: Path) -> None:
    spool, server = tmp_path / "spool", Server()
    sender = Shipper(str(spool), ["hunter2"], server.take)
    spool.write_bytes(b"the password is hunt")
    ship_all(sender)
    assert server.log == b"the password is "
    spool.write_bytes(b"the password is hunter2!")
    ship_all(sender)
    assert server.log == b"the password is *******!"
