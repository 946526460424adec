"""A TCP relay in front of a scheduler, whose faults tests choose."""

from __future__ import annotations

import contextlib
import socket
import threading

from dstackweb.backends.dask.wire import HANDSHAKE, pack

HANDSHAKE_BYTES = len(pack(HANDSHAKE))


class Relay:
    """`port` leads to another port of this machine. `open`: whether it accepts; `answers`: whether answers arrive.

    Without answers it lets the handshake through, and closes the connection when the other side answers a question.
    """

    def __init__(self, to: int) -> None:
        self.to, self.open, self.answers = to, True, True
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                if not self.open:
                    near.close()
                    continue
                far = socket.create_connection(("127.0.0.1", self.to))
                asked = [0]
                threading.Thread(target=self._pass, args=(near, far, asked, 1), daemon=True).start()
                threading.Thread(target=self._pass, args=(far, near, asked, 0), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, asked: list[int], count: int) -> None:
        """`asked` counts the bytes that the near side has sent: its handshake, then one question after the other."""
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                asked[0] += count * len(data)
                if not count and not self.answers and asked[0] > HANDSHAKE_BYTES:
                    break
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
