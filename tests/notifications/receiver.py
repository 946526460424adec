"""Receivers for notifications on loopback, of HTTP and of mails."""

from __future__ import annotations

import threading
from email import message_from_bytes
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import StreamRequestHandler, ThreadingTCPServer
from types import TracebackType
from typing import Any, NamedTuple


class Request(NamedTuple):
    """A request as it came; names of headers are in lower case."""

    path: str
    headers: dict[str, str]
    body: bytes


class Receiver:
    """Keeps what it is sent, and answers with `answers` in turn, then with 204; with `retry_after` if there is one."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.answers: list[int] = []
        self.retry_after = ""
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                headers = {name.lower(): value for name, value in self.headers.items()}
                receiver.requests.append(Request(self.path, headers, body))
                status = receiver.answers.pop(0) if receiver.answers else 204
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", f"{receiver.url}moved")
                if receiver.retry_after:
                    self.send_header("Retry-After", receiver.retry_after)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def port(self) -> int:
        return int(self.server.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def __enter__(self) -> Receiver:
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


class MailServer:
    """A small SMTP server on loopback: keeps each mail, and answers `data` lines with `refusals` in turn, then 250."""

    def __init__(self) -> None:
        self.mails: list[tuple[str, Message]] = []
        self.refusals: list[str] = []
        mails, refusals = self.mails, self.refusals

        class Handler(StreamRequestHandler):
            def handle(self) -> None:
                self._say("220 test")
                to = ""
                while line := self.rfile.readline().decode().strip():
                    word = line[:4].upper()
                    if word == "RCPT":
                        to = line.partition("<")[2].partition(">")[0]
                    if word == "DATA":
                        self._say("354 go on")
                        text = b"".join(iter(self.rfile.readline, b".\r\n"))
                        if refusals:
                            self._say(refusals.pop(0))
                            continue
                        mails.append((to, message_from_bytes(text)))
                    self._say("221 bye" if word == "QUIT" else "250 ok")
                    if word == "QUIT":
                        return

            def _say(self, line: str) -> None:
                self.wfile.write(f"{line}\r\n".encode())

        self.server = ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def port(self) -> int:
        return int(self.server.server_address[1])

    def __enter__(self) -> MailServer:
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()
