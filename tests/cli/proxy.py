"""A TCP proxy whose wire can be cut, so that a real server's restart is seen from the client's side."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class Proxy:
    """Forwards bytes to `host:port` until `down()`, and again after `up()`, on the same address."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener: socket.socket | None = None
        self._open: list[socket.socket] = []
        self._port = 0
        self.cut_after: int | None = None
        """The next answer is cut off after this many bytes."""
        self.up()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def up(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self._port))
        self._port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=[self._listener], daemon=True).start()

    def down(self) -> None:
        """Refuse new connections and break the open ones."""
        for each in [*self._open, self._listener]:
            if each is not None:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()
        self._open.clear()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client, _address = listener.accept()
                server = socket.create_connection(self._target)
                self._open += [client, server]
                threading.Thread(target=self._forward, args=[client, server, False], daemon=True).start()
                threading.Thread(target=self._forward, args=[server, client, True], daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if is_answer and self.cut_after is not None:
                    data, self.cut_after = data[: self.cut_after], None
                    target.sendall(data)
                    break
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
