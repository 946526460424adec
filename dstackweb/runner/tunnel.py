"""The runner's connection to the gateway, over which people reach a job: shells, commands, and its ports.

The runner calls out, so its machine needs no open port. A thread of its own with an event loop: the job's commands, and
what the API wants of them, wait for nothing here.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import signal
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from dstackweb.runner import dial
from dstackweb.runner.child import CannotStart, HostFault
from dstackweb.runner.client import backoff, is_this_machine
from dstackweb.runner.exec_target import IDE_SOCKET, ExecTarget
from dstackweb.runner.link import Link
from dstackweb.runner.state import say
from dstackweb.runner.streams import CHUNK, COMMAND_MAX, MESSAGE_MAX, MessageKind, Mux, ProtocolError, Stream
from dstackweb.runner.websocket import NotConnected, connect

JOBS = "/.dstackweb/jobs/"
"""Where the gateway takes the connections of runners."""
SILENCE_S = 60.0
"""The gateway says something every 20 s."""
LAST_OUTPUT_S = 1.0
"""How long output is waited for once a command has ended: processes that it left may keep it open."""
STOP_S = 2.0
CONNECT_S = 20.0
"""How long a port may take to accept a connection: its process may be busy with those before."""
AGAIN_S = 0.1
"""How long until it is tried again."""
SIGNALS = {"HUP", "INT", "QUIT", "KILL", "USR1", "USR2", "TERM"}


def address(gateway: dict[str, Any], api: str, *, insecure: bool) -> str:
    """The gateway's URL: the one that is set, or that of a port of the API's own machine.

    Raises ValueError for plain HTTP to another machine, as the API's client does.
    """
    found = str(gateway.get("url") or f"http://{urlsplit(api).hostname}:{gateway['port']}")
    if urlsplit(found).scheme != "https" and not insecure and not is_this_machine(urlsplit(found).hostname or ""):
        raise ValueError(f"{found}: plain HTTP is for this machine only; set DSTACKWEB_GATEWAY_URL to an https:// URL")
    return found.rstrip("/")


def open_tunnel(link: Link, target: ExecTarget) -> Tunnel | None:
    """The connection of a job whose runner has this link to the API; None where there can't be one."""
    try:
        root = address(link.spec["gateway"], link.orders["api"], insecure=bool(link.orders.get("insecure")))
    except ValueError as error:
        say(f"people can't connect to this job: {error}")
        return None
    headers = {"Authorization": f"Bearer {link.orders['token']}", "X-Nonce": link.state.nonce()}
    tunnel = Tunnel(f"{root}{JOBS}{link.job_id}", headers, target)
    tunnel.start()
    return tunnel


class Dialer:
    """Makes connections to what listens in a job's place, one after the other."""

    def __init__(self, target: ExecTarget) -> None:
        self._target, self._turn = target, asyncio.Lock()
        self._dialer: socket.socket | None = None

    async def connect(self, request: dict[str, object]) -> socket.socket:
        """Raises NotMade, or another OSError if what makes connections has failed."""
        until = time.monotonic() + CONNECT_S
        while True:
            async with self._turn:
                try:
                    self._dialer = self._dialer or self._target.dialer()
                    return await asyncio.to_thread(dial.ask, self._dialer, request)
                except dial.NotMade as error:
                    if error.code != dial.TIMEOUT or time.monotonic() > until:
                        raise
                except OSError:
                    if self._dialer is not None:
                        self._dialer.close()
                        self._dialer = None
                    raise
            await asyncio.sleep(AGAIN_S)


class Tunnel:
    """`url` is that of the job's connection at the gateway; `headers` show that it is this job's runner."""

    def __init__(self, url: str, headers: dict[str, str], target: ExecTarget) -> None:
        self._url, self._headers, self._target = url, headers, target
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="tunnel", daemon=True)
        self._lock = threading.Lock()
        """Held while a process is started, until its end is waited for."""
        self._ends: dict[int, asyncio.Future[int]] = {}
        self._main: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Close the connection, if the thread answers."""

        def cancel() -> None:
            if self._main is not None:
                self._main.cancel()

        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(cancel)
        self._thread.join(STOP_S)

    def note_ended(self, ended: dict[int, int]) -> None:
        """Children of the runner have ended, with these wait statuses."""
        with self._lock:
            for pid, status in ended.items():
                if (end := self._ends.pop(pid, None)) is not None:
                    with contextlib.suppress(RuntimeError):
                        self._loop.call_soon_threadsafe(_resolve, end, status)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._main = self._loop.create_task(self._keep_connected())
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._main)

    async def _keep_connected(self) -> None:
        self._dialer = Dialer(self._target)
        failures = 0
        while True:
            try:
                await self._connect()
                failures = 0
            except (NotConnected, ProtocolError, OSError) as error:
                failures += 1
                if failures in (1, 10):
                    say(f"the gateway can't be reached, retrying: {error}")
            await asyncio.sleep(backoff(failures))

    async def _connect(self) -> None:
        """Serve one connection until it ends. Raises NotConnected, ProtocolError, OSError."""
        connection = await connect(self._url, self._headers, most=MESSAGE_MAX)
        mux = Mux(connection.send, self._serve)
        try:
            while True:
                mux.receive(await connection.receive(SILENCE_S))
        except NotConnected as error:
            say(f"the connection to the gateway has ended: {error}")
        finally:
            mux.lose()
            connection.close()

    async def _serve(self, stream: Stream, what: dict[str, Any]) -> None:
        try:
            if what["kind"] == "exec":
                await self._execute(stream, what)
            elif what["kind"] == "tcp":
                await self._forward(stream, {"port": int(what["port"])})
            elif what["kind"] == "service":
                # Only to what its own user serves: its callers trust the run, not whatever has the port.
                user = await asyncio.to_thread(self._target.port_user)
                await self._forward(stream, {"port": int(what["port"]), **({} if user is None else {"uid": user})})
            elif what["kind"] == "ide":
                await self._forward(stream, {"path": IDE_SOCKET})
            else:
                await stream.close(error="this runner is older than the gateway")
        except (CannotStart, HostFault) as error:
            await stream.close(error=str(error))

    async def _forward(self, stream: Stream, request: dict[str, object]) -> None:
        try:
            connection = await self._dialer.connect(request)
        except dial.NotMade as error:
            await stream.close(error=str(error), code=error.code)
            return
        reader, writer = await asyncio.open_connection(sock=connection)
        await stream.accept()
        await pump(stream, reader, writer)

    async def _execute(self, stream: Stream, what: dict[str, Any]) -> None:
        command = what.get("command")
        if command is not None and (not isinstance(command, str) or len(command) > COMMAND_MAX):
            raise ValueError("the command is too long")
        inner: tuple[int, int, int]
        outer: tuple[int, int, int | None]
        with contextlib.ExitStack() as files:
            terminal = what.get("tty")
            if terminal:
                main, second = pty.openpty()
                _resize(main, terminal)
                inner, outer = (second, second, second), (main, main, None)
            else:
                source, stdin = os.pipe()
                stdout, sink = os.pipe()
                stderr, errors = os.pipe()
                inner, outer = (source, sink, errors), (stdin, stdout, stderr)
            for number in {number for number in outer if number is not None}:
                files.callback(_close, number)
            try:
                end = self._start_shell(what, command, inner)
            finally:
                for number in set(inner):
                    os.close(number)
            pid, status = end
            stream.on_control = lambda control: _control(control, outer[0] if terminal else None, pid)
            await stream.accept()
            await self._carry(stream, pid, status, outer)

    def _start_shell(
        self, what: dict[str, Any], command: str | None, streams: Sequence[int]
    ) -> tuple[int, asyncio.Future[int]]:
        terminal = what.get("tty")
        with self._lock:
            pid = self._target.shell(
                command, tty=bool(terminal), sftp=bool(what.get("sftp")), streams=streams,
                term=str((terminal or {}).get("term", "xterm"))[:60],
            )  # fmt: skip
            end = self._ends[pid] = self._loop.create_future()
        return pid, end

    async def _carry(
        self, stream: Stream, pid: int, status: asyncio.Future[int], outer: tuple[int, int, int | None]
    ) -> None:
        """Carry a process's input and output until it has ended, or the other end has gone."""
        source, sink, errors = outer
        for number in {number for number in outer if number is not None}:
            os.set_blocking(number, False)
        outputs = [asyncio.ensure_future(_send(stream, sink, MessageKind.DATA))]
        if errors is not None:
            outputs.append(asyncio.ensure_future(_send(stream, errors, MessageKind.ERROR_DATA)))
        intake = asyncio.ensure_future(_receive(stream, source, closes=errors is not None))
        waited: list[asyncio.Future[Any]] = [status, intake]
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not status.done() and stream.end is None:  # the end of its input
                gone = asyncio.ensure_future(stream.read())
                waited = [status, gone]
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                gone.cancel()
            if status.done():
                await asyncio.wait(outputs, timeout=LAST_OUTPUT_S)
                code = os.waitstatus_to_exitcode(status.result())
                with contextlib.suppress(OSError):
                    await stream.close(**({"signal": signal.Signals(-code).name[3:]} if code < 0 else {"status": code}))
        finally:
            for task in (intake, *outputs):
                task.cancel()
            await asyncio.gather(intake, *outputs, return_exceptions=True)
            if not status.done():
                with contextlib.suppress(OSError):
                    os.killpg(pid, signal.SIGHUP)


def _resolve(end: asyncio.Future[int], status: int) -> None:
    if not end.done():
        end.set_result(status)


def _close(number: int) -> None:
    with contextlib.suppress(OSError):
        os.close(number)


def _resize(terminal: int, size: dict[str, Any]) -> None:
    given = [int(size.get(name) or usual) for name, usual in (("rows", 24), ("columns", 80))]
    rows, columns = (max(1, min(10_000, number)) for number in given)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def _control(what: dict[str, Any], terminal: int | None, pid: int) -> None:
    with contextlib.suppress(OSError, ValueError, TypeError):
        if "signal" in what and what["signal"] in SIGNALS:
            os.killpg(pid, signal.Signals[f"SIG{what['signal']}"])
        elif terminal is not None:
            _resize(terminal, what)


async def _until(add: Callable[[int, Callable[[], None]], Any], remove: Callable[[int], Any], number: int) -> None:
    """Wait until a descriptor can be read or written."""
    ready = asyncio.Event()
    add(number, ready.set)
    try:
        await ready.wait()
    finally:
        remove(number)


async def _send(stream: Stream, number: int, kind: MessageKind) -> None:
    """Send what is written to a pipe or a terminal, until its end."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            data = os.read(number, CHUNK)
        except BlockingIOError:
            await _until(loop.add_reader, loop.remove_reader, number)
            continue
        except OSError:  # EIO: a terminal that nothing has open
            return
        if not data:
            return
        try:
            await stream.write(data, kind)
        except OSError:
            return


async def _receive(stream: Stream, number: int, *, closes: bool) -> None:
    """Write what is sent to a pipe or a terminal, until its end, or that of the stream."""
    loop = asyncio.get_running_loop()
    while (found := await stream.read()) is not None:
        kind, data = found
        if kind == MessageKind.EOF:
            if closes:
                os.close(number)
            return
        while data:
            try:
                data = data[os.write(number, data) :]
            except BlockingIOError:
                await _until(loop.add_writer, loop.remove_writer, number)
            except OSError:  # nothing reads any more
                data = b""


async def pump(
    stream: Stream, reader: Any, writer: Any, on_data: Callable[[], None] = lambda: None, *, half_closes: bool = True
) -> None:
    """Carry a connection's bytes both ways, until both ends have finished or one is lost.

    `reader` and `writer` are those of asyncio, or like them; `on_data` is called for what the reader has. Where the
    connection's end never finishes by halves, the stream ends with what the reader has.
    """

    async def send() -> None:
        while data := await reader.read(CHUNK):
            on_data()
            await stream.write(data)
        if not half_closes:
            raise ConnectionError("the connection is closed")
        await stream.finish()

    async def receive() -> None:
        while (found := await stream.read()) is not None:
            if found[0] == MessageKind.EOF:
                if writer.can_write_eof():
                    writer.write_eof()
                return
            writer.write(found[1])
            await writer.drain()
        raise ConnectionError("the stream has ended")

    tasks = [asyncio.ensure_future(send()), asyncio.ensure_future(receive())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        writer.close()
        with contextlib.suppress(OSError):
            await stream.close()
