"""A TCP relay in front of a scheduler, whose faults tests choose."""

from __future__ import annotations

import contextlib
import socket
import threading

from dstackweb.backends.dask.scheduler import HANDSHAKE, pack
from tests.backends.contract.gate import Gate

HANDSHAKE_BYTES = len(pack(HANDSHAKE))


class Relay:
    """`port` leads to another port of this machine. `open`: whether it accepts; `answers`: whether answers arrive.

    Without answers it lets the handshake through, and closes the connection when the other side answers a question.
    Answers to orders pass its `gate`.
    """

    def __init__(self, to: int) -> None:
        self.to, self.open, self.answers, self.gate = to, True, True, Gate()
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
                asked: list[bytes] = []
                threading.Thread(target=self._pass, args=(near, far, asked, True), daemon=True).start()
                threading.Thread(target=self._pass, args=(far, near, asked, False), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, asked: list[bytes], is_question: bool) -> None:
        """`asked` is what the near side has sent: its handshake, then one question after the other."""
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if is_question:
                    asked.append(data)
                elif len(sent := b"".join(asked)) > HANDSHAKE_BYTES:
                    if not self.answers:
                        break
                    if b"launch" in sent:
                        self.gate.pass_through()
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
