"""Connections to what a job serves, where it is too busy to accept them."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator

import pytest

from dstackweb.runner import dial, tunnel
from dstackweb.runner.tunnel import Dialer
from tests.support import run_async


class Place:
    """Where the job runs: connections are made by a thread here, as its own process makes them. Counts requests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.asked = 0
        self._thread = threading.Thread(target=dial.main, args=(its.detach(),))
        self._thread.start()
        self._ask = dial.ask
        monkeypatch.setattr(dial, "ask", self.ask)

    def ask(self, requests: socket.socket, request: dict[str, object]) -> socket.socket:
        self.asked += 1
        return self._ask(requests, request)

    def dialer(self) -> socket.socket:
        return self.mine

    def close(self) -> None:
        self.mine.close()
        self._thread.join()


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    found = Place(monkeypatch)
    yield found
    found.close()


@pytest.fixture
def busy() -> Iterator[socket.socket]:
    """A port at which as many wait to be accepted as it has room for."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as port, socket.create_connection(port.getsockname()):
        yield port


def test_a_connection_that_a_busy_port_has_no_room_for_is_given_up_at_once(busy: socket.socket) -> None:
    with pytest.raises(TimeoutError):
        dial.connect({"port": busy.getsockname()[1]})


def test_it_is_asked_for_again_until_there_is_room(busy: socket.socket, place: Place) -> None:
    async def talk() -> bytes:
        connecting = asyncio.ensure_future(dialer(place).connect({"port": busy.getsockname()[1]}))
        while place.asked < 3:
            await asyncio.sleep(0)
        assert not connecting.done()
        busy.accept()[0].close()
        with await connecting as connection:
            connection.send(b"hello")
            return busy.accept()[0].recv(9)

    assert run_async(talk()) == b"hello"


def test_a_port_that_stays_busy_is_given_up_in_the_end(
    busy: socket.socket, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tunnel, "CONNECT_S", 0.15)

    async def talk() -> None:
        await dialer(place).connect({"port": busy.getsockname()[1]})

    with pytest.raises(dial.NotMade) as error:
        run_async(talk())
    assert error.value.code == dial.TIMEOUT
    assert place.asked > 1


def dialer(place: Place) -> Dialer:
    return Dialer(place)  # type: ignore[arg-type]  # of a job's place it uses this alone
