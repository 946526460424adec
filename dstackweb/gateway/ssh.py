"""The SSH front: `ssh -p 2222 RUN@server`. The key says who it is, the user name which run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Mapping
from typing import Any

import asyncssh
from asyncssh.stream import SSHTCPStreamSession

from dstackweb.gateway import access
from dstackweb.gateway.access import Visitor
from dstackweb.gateway.places import Places
from dstackweb.gateway.tunnels import Tunnel, Tunnels, in_database
from dstackweb.lib.network import network_of
from dstackweb.runner.streams import MessageKind, Stream, StreamRefused
from dstackweb.runner.tunnel import pump

log = logging.getLogger(__name__)

LOGIN_S = 30.0
KEYS_MOST = 10
"""Keys that one connection may offer: agents offer all that they have."""
FAILURES_MOST, FAILURES_S = 30, 60.0
"""Keys from one network that lead nowhere within this time, before further ones are refused."""
LOOPBACK = ("localhost", "127.0.0.1", "::1", "")
NOT_CONNECTED = "dstackweb: {run} is {status}, and its runner is not connected\r\n"
INPUT_MOST = 128 * 1024


class FailedKeys:
    """Number of keys that led nowhere, by network."""

    def __init__(self) -> None:
        self._times: dict[str, deque[float]] = {}

    def are_too_many(self, address: str, now: float) -> bool:
        return len(self._recent(network_of(address), now)) >= FAILURES_MOST

    def note(self, address: str, now: float) -> None:
        if len(self._times) > 10_000:
            self._times = {network: times for network, times in self._times.items() if self._recent(network, now)}
        self._times.setdefault(network_of(address), deque(maxlen=FAILURES_MOST)).append(now)

    def _recent(self, network: str, now: float) -> deque[float]:
        times = self._times.get(network, deque())
        while times and now - times[0] > FAILURES_S:
            times.popleft()
        return times


class SshServer:
    def __init__(self, tunnels: Tunnels, places: Places, *, login_s: float = LOGIN_S) -> None:
        self.tunnels, self.places, self.failed_keys = tunnels, places, FailedKeys()
        self._login_s = login_s
        self.connections: set[SshConnection] = set()

    async def listen(self, host: str, port: int, key: str) -> asyncssh.SSHAcceptor:
        """Raises OSError."""
        return await asyncssh.listen(
            host, port, server_factory=lambda: SshConnection(self), server_host_keys=[key], server_version="dstackweb",
            login_timeout=self._login_s, keepalive_interval=30, keepalive_count_max=4, encoding=None, line_editor=False,
            agent_forwarding=False, x11_forwarding=False, allow_scp=False, gss_host=None, compression_algs=None,
            password_auth=False, kbdint_auth=False, public_key_auth=True,
        )  # fmt: skip

    async def recheck(self) -> None:
        """Close the connections of those who may no longer enter, again and again."""
        while True:
            await asyncio.sleep(access.RECHECK_S)
            entered = {(one.entry.user_id, one.entry.run_id): one for one in self.connections if one.entry}
            try:
                allowed = await in_database(access.may_still_enter, list(entered))
            except Exception:
                log.exception("who may still enter can't be read")
                continue
            for one in list(self.connections):
                if one.entry and (one.entry.user_id, one.entry.run_id) not in allowed:
                    one.close()


class SshConnection(asyncssh.SSHServer):
    def __init__(self, front: SshServer) -> None:
        self.front, self.tunnels = front, front.tunnels
        self.entry: Visitor | None = None
        self._connection: asyncssh.SSHServerConnection | None = None
        self._address = ""
        self._offered = 0

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self._connection = conn
        self._address = str((conn.get_extra_info("peername") or ("",))[0])
        self.front.connections.add(self)
        self.front.places.enter(conn, self._address)

    def connection_lost(self, exc: Exception | None) -> None:
        self.front.connections.discard(self)
        if self._connection is not None:
            self.front.places.leave(self._connection)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def public_key_auth_supported(self) -> bool:
        return True

    async def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
        """Whether the key opens the run. The answer is the same for a run that does not exist."""
        self._offered += 1
        if self._offered > 2 * KEYS_MOST or self.front.failed_keys.are_too_many(self._address, time.monotonic()):
            self.close()
            return False
        self.entry = await in_database(access.by_key, username[:200], key.get_fingerprint())
        if self.entry is None:
            self.front.failed_keys.note(self._address, time.monotonic())
        return self.entry is not None

    def auth_completed(self) -> None:
        if self.entry is None or self._connection is None:
            return
        if self.front.places.know(self._connection, self.entry.user):
            log.info("%s enters %s by SSH from %s", self.entry.user, self.entry.run, self._address)
        else:
            self._connection.disconnect(asyncssh.DISC_TOO_MANY_CONNECTIONS, "too many connections are open")

    def session_requested(self) -> SshSession:
        assert self.entry is not None
        return SshSession(self.tunnels, self.entry)

    async def connection_requested(
        self, dest_host: str, dest_port: int, orig_host: str, orig_port: int
    ) -> SSHTCPStreamSession[bytes]:
        """A port of the job's place."""
        assert self.entry is not None
        if dest_host not in LOOPBACK:
            raise asyncssh.ChannelOpenError(
                asyncssh.OPEN_ADMINISTRATIVELY_PROHIBITED, "only ports of localhost can be forwarded"
            )
        try:
            stream = await self.tunnels.open(self.entry.run_id, kind="tcp", port=dest_port)
        except StreamRefused as refused:
            raise asyncssh.ChannelOpenError(asyncssh.OPEN_CONNECT_FAILED, str(refused)) from None
        tunnel = self.tunnels.of_run(self.entry.run_id)
        use = tunnel.use if tunnel is not None else lambda: None
        use()
        return SSHTCPStreamSession(lambda reader, writer: pump(stream, reader, writer, use))


class SshSession(asyncssh.SSHServerSession[bytes]):
    """A shell, a command, or the copying of files."""

    def __init__(self, tunnels: Tunnels, entry: Visitor) -> None:
        self._tunnels, self._entry = tunnels, entry
        self._channel: asyncssh.SSHServerChannel[bytes] | None = None
        self._what: dict[str, Any] = {"kind": "exec"}
        self._input: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._held = 0
        self._stream: Stream | None = None
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._work: asyncio.Task[None] | None = None
        self._tunnel: Tunnel | None = None

    def connection_made(self, chan: asyncssh.SSHServerChannel[bytes]) -> None:
        self._channel = chan

    def pty_requested(
        self, term_type: str, term_size: tuple[int, int, int, int], term_modes: Mapping[int, int]
    ) -> bool:
        self._what["tty"] = {"term": term_type, "columns": term_size[0], "rows": term_size[1]}
        return True

    def shell_requested(self) -> bool:
        return True

    def exec_requested(self, command: str) -> bool:
        self._what["command"] = command
        return True

    def subsystem_requested(self, subsystem: str) -> bool:
        self._what["sftp"] = True
        return subsystem == "sftp"

    def session_started(self) -> None:
        self._work = asyncio.ensure_future(self._run())

    def data_received(self, data: bytes, datatype: int | None) -> None:
        self._held += len(data)
        self._input.put_nowait(data)
        if self._held > INPUT_MOST and self._channel is not None:
            self._channel.pause_reading()
        if self._tunnel is not None:
            self._tunnel.use()

    def eof_received(self) -> bool:
        self._input.put_nowait(None)
        return True

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    def terminal_size_changed(self, width: int, height: int, pixwidth: int, pixheight: int) -> None:
        self._control(columns=width, rows=height)

    def signal_received(self, signal: str) -> None:
        self._control(signal=signal)

    def break_received(self, msec: int) -> bool:
        self._control(signal="INT")
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        if self._work is not None:
            self._work.cancel()

    def _control(self, **what: Any) -> None:
        if self._stream is not None:
            asyncio.ensure_future(_quietly(self._stream.control(**what)))  # noqa: RUF006  # it ends by itself

    async def _run(self) -> None:
        channel = self._channel
        assert channel is not None
        try:
            stream = self._stream = await self._tunnels.open(self._entry.run_id, **self._what)
        except StreamRefused as refused:
            connected = self._tunnels.of_run(self._entry.run_id) is not None
            missing = NOT_CONNECTED.format(run=self._entry.run, status=refused)
            text = f"dstackweb: {refused}\r\n" if connected else missing
            channel.write_stderr(text.encode())
            channel.exit(255)
            return
        self._tunnel = self._tunnels.of_run(self._entry.run_id)
        if self._tunnel is not None:
            self._tunnel.use()
        intake = asyncio.ensure_future(_quietly(self._send_input(stream)))
        try:
            await self._show_output(stream)
            self._leave(stream.end or {})
        finally:
            intake.cancel()
            await _quietly(stream.close())

    async def _send_input(self, stream: Stream) -> None:
        while (data := await self._input.get()) is not None:
            await stream.write(data)
            self._held -= len(data)
            if self._held <= INPUT_MOST and self._channel is not None:
                self._channel.resume_reading()
        await stream.finish()

    async def _show_output(self, stream: Stream) -> None:
        assert self._channel is not None
        while (found := await stream.read()) is not None:
            await self._may_write.wait()
            kind, data = found
            if kind != MessageKind.EOF:
                self._channel.write(data, asyncssh.EXTENDED_DATA_STDERR if kind == MessageKind.ERROR_DATA else None)

    def _leave(self, end: dict[str, Any]) -> None:
        assert self._channel is not None
        if "status" in end:
            self._channel.exit(int(end["status"]))
        elif "signal" in end:
            self._channel.exit_with_signal(str(end["signal"]))
        else:
            self._channel.write_stderr(f"dstackweb: {end.get('error', 'the session has ended')}\r\n".encode())
            self._channel.exit(255)


async def _quietly(work: Awaitable[None]) -> None:
    with contextlib.suppress(OSError):
        await work
