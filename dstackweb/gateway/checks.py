"""The checks of services: by the way of their requests, so that what is found is what callers get."""

from __future__ import annotations

import asyncio
import logging

from django.utils import timezone

from dstackweb.gateway.access import CheckedPort
from dstackweb.gateway.tunnels import NOTE_S, Tunnel, in_database
from dstackweb.runner.streams import BUSY, MessageKind, Stream, StreamRefused
from dstackweb.runs import service_health
from dstackweb.runs.service_codes import CheckFailure
from dstackweb.runs.service_health import Check, HealthReport, advanced

log = logging.getLogger(__name__)

ANSWER_MOST = 64
"""Bytes of an answer that are enough for its status."""
HEALTHY = range(200, 400)


class Checks:
    """Those of all services whose runners are connected."""

    def __init__(self) -> None:
        self._to_keep: dict[int, tuple[int, HealthReport]] = {}
        """By run, the attempt and what was found since that was last stored."""

    async def watch(self, tunnel: Tunnel) -> None:
        """Check a service again and again, if it is one. A result that can't be stored is found again."""
        service, run_id, attempt = tunnel.runner.service, tunnel.runner.run_id, tunnel.runner.attempt
        if service is None:
            return
        health: HealthReport | None = None
        is_known = False
        while True:
            try:
                if not is_known:
                    health = await in_database(service_health.stored_health, run_id, attempt)
                    is_known = True
                check = await checked(tunnel, service)
                if check is not None:
                    after = advanced(health, check, service.rules.unhealthy_after)
                    if health is None or after.state != health.state:
                        self._to_keep.pop(run_id, None)
                        await in_database(service_health.change, run_id, attempt, health, after)
                    else:
                        self._to_keep[run_id] = attempt, after
                    health = after
            except Exception:
                log.exception("the check of run %d was not stored, will retry", run_id)
            await asyncio.sleep(service.rules.interval_s)

    async def keep(self) -> None:
        """Store what changed no state, again and again, for all services at once."""
        while True:
            await asyncio.sleep(NOTE_S)
            found, self._to_keep = self._to_keep, {}
            if found:
                try:
                    await in_database(service_health.keep, found)
                except Exception:
                    log.exception("the checks of %d services can't be stored", len(found))


async def checked(tunnel: Tunnel, service: CheckedPort) -> Check | None:
    """One check. None where nothing was found out: the tunnel is lost, or too many requests are open."""
    port, timeout_s = service.port, service.rules.timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            stream = await tunnel.mux.open(kind="service", port=port)
            try:
                answer = b"" if service.rules.path is None else await _fetched(stream, service.rules.path, port)
            finally:
                await stream.close()
    except TimeoutError:
        found: tuple[CheckFailure | None, dict[str, object]] = CheckFailure.TIMEOUT, {"timeout_s": timeout_s}
    except StreamRefused as refused:
        if refused.code == BUSY:
            return None
        found = _refusal(refused, port, timeout_s)
    except OSError:
        found = CheckFailure.NO_HTTP, {}
    else:
        found = (None, {}) if service.rules.path is None else _judged(answer)
    return None if tunnel.mux.is_lost else Check(timezone.now(), *found)


async def _fetched(stream: Stream, path: str, port: int) -> bytes:
    """The beginning of the answer to a GET. Raises OSError."""
    lines = (
        f"GET {path} HTTP/1.1", f"Host: localhost:{port}", "User-Agent: dstackweb-health-check", "Accept: */*",
        "Connection: close", "", "",
    )  # fmt: skip
    await stream.write("\r\n".join(lines).encode())
    answer = b""
    while b"\n" not in answer and len(answer) < ANSWER_MOST and (found := await stream.read()) is not None:
        if found[0] == MessageKind.EOF:
            break
        answer += found[1]
    return answer


def _judged(answer: bytes) -> tuple[CheckFailure | None, dict[str, object]]:
    words = answer.split(b"\r\n", 1)[0].split(None, 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        return CheckFailure.NO_HTTP, {}
    status = int(words[1])
    return (None, {}) if status in HEALTHY else (CheckFailure.STATUS, {"status": status})


def _refusal(refused: StreamRefused, port: int, timeout_s: int) -> tuple[CheckFailure, dict[str, object]]:
    """Why the runner made no connection."""
    known = {failure.value: failure for failure in (CheckFailure.REFUSED, CheckFailure.FOREIGN, CheckFailure.TIMEOUT)}
    failure = known.get(refused.code, CheckFailure.UNREACHABLE)
    if failure == CheckFailure.UNREACHABLE:
        return failure, {"text": str(refused)[:300]}
    return failure, {"timeout_s": timeout_s} if failure == CheckFailure.TIMEOUT else {"port": port}
