"""How people and programs reach a run through the gateway, who may, and the tickets and cookies of its pages.

These are an origin of their own, with a cookie of their own, which the gateway gives once for the dashboard's ticket.
"""

from __future__ import annotations

import datetime as dt
import secrets
import time
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import quote, urlsplit

from django.conf import settings
from django.core import signing
from django.utils import timezone
from django.utils.translation import gettext as _

from dstackweb.accounts.access import allows, may_change, role_in
from dstackweb.accounts.models import User
from dstackweb.lib.errors import Conflict
from dstackweb.runs.models import Run, RunActivity
from dstackweb.runs.service_health import HealthReport, health_of
from dstackweb.runs.states import ACTIVE, RunStatus
from dstackweb.spec.codes import Ide, RunType
from dstackweb.spec.effective import EffectiveSpec

CONNECTED_S = 40.0
"""The gateway notes connected runs every 10 s."""
TICKET_S, COOKIE_S = 30, 12 * 3600
TICKET_SALT, COOKIE_SALT = "dstackweb.gateway.ticket", "dstackweb.gateway.cookie"
ENTER = "/.dstackweb/enter"


def gateway() -> dict[str, Any] | None:
    """Where a job's runner finds the gateway: by a URL, or by a port of the machine of the API; None without one."""
    if not is_there():
        return None
    return {"url": settings.DSTACKWEB_GATEWAY_URL, "port": settings.DSTACKWEB_GATEWAY_PORT}


def is_there() -> bool:
    return bool(settings.DSTACKWEB_GATEWAY_URL or settings.DSTACKWEB_GATEWAY_PORT)


def require_gateway(spec: EffectiveSpec) -> None:
    """Raises Conflict for a dev environment or a service that could not be reached."""
    if spec.is_dev_environment and not is_there():
        raise Conflict(_("this server has no gateway, by which people connect to dev environments"))
    if spec.is_service and not is_there():
        raise Conflict(_("this server has no gateway, by which services are reached"))


@dataclass(frozen=True)
class LastUse:
    """Whether a run's runner is connected to the gateway, and its use."""

    ready: bool
    used_at: dt.datetime | None
    stops_s: int | None
    """Seconds of further inactivity after which it is stopped; None: never."""


@dataclass(frozen=True)
class Connection(LastUse):
    """How to connect to a run. Empty is not offered."""

    ssh: str
    vscode: str
    opens: bool


def use_of(run: Run) -> LastUse:
    activity = RunActivity.objects.filter(run=run, attempt=run.attempt).first()
    limit: int | None = run.spec.get("inactivity_duration_s")
    seen = activity.connected_at if activity else None
    return LastUse(
        ready=seen is not None and (timezone.now() - seen).total_seconds() < CONNECTED_S,
        used_at=activity.used_at if activity else None,
        stops_s=None if limit is None else max(0, round(limit - (activity.idle_s if activity else 0))),
    )


def connection_to(run: Run) -> Connection | None:
    """How to connect to a running dev environment or hold; None for any other run, and without a gateway."""
    if not (run.spec.get("hold") or run.spec.get("type") == RunType.DEV_ENVIRONMENT) or run.status != RunStatus.RUNNING:
        return None
    if not is_there():
        return None
    ide = run.spec.get("ide")
    host, user = ssh_host(), ssh_user(run)
    port = settings.DSTACKWEB_SSH_PORT
    ssh = f"ssh -p {port} {user}@{host}" if port else ""
    link = f"vscode://vscode-remote/ssh-remote+{quote(f'{user}@{host}:{port}', safe='')}{folder_of(run)}"
    vscode = link if ssh and ide == Ide.VSCODE else ""
    return Connection(**vars(use_of(run)), ssh=ssh, vscode=vscode, opens=ide == Ide.JUPYTER)


@dataclass(frozen=True)
class Service:
    """A running service: where it is reached, whether its runner is connected, its health, and its use."""

    url: str
    port: int
    use: LastUse
    health: HealthReport


def service_of(run: Run) -> Service | None:
    """What a running service offers; None for any other run, and without a gateway."""
    health = health_of(run) if is_there() else None
    return None if health is None else Service(origin_of(run), run.spec["port"], use_of(run), health)


def open_path(run: Run) -> str:
    """The path of the dashboard's page that leads to the run's pages."""
    return f"/p/{quote(run.project.name)}/runs/{run.uid}/open/"


def folder_of(run: Run) -> str:
    """The folder that VS Code opens: the one the file names, if it is absolute; else the home folder is there."""
    folder: str = run.spec.get("working_dir") or ""
    return quote(folder) if folder.startswith("/") else "/"


def ssh_user(run: Run) -> str:
    """The user name that leads to a run: its name, or its id where other projects have an active run of this name."""
    others = Run.objects.filter(name=run.name, status__in=ACTIVE).exclude(pk=run.pk)
    return str(run.uid) if others.exists() else run.name


def ssh_host() -> str:
    """The name by which people reach the gateway."""
    urls = (settings.DSTACKWEB_GATEWAY_URL, settings.DSTACKWEB_PUBLIC_URL, settings.DSTACKWEB_API_URL)
    hosts = (urlsplit(url).hostname for url in urls)
    return settings.DSTACKWEB_SSH_HOST or next(filter(None, hosts), "localhost")


def origin_of(run: Run) -> str:
    """The origin of a run's pages, which no other run and not the dashboard has."""
    parts = urlsplit(settings.DSTACKWEB_GATEWAY_URL or f"http://localhost:{settings.DSTACKWEB_GATEWAY_PORT}")
    return f"{parts.scheme}://{run.uid}.{parts.netloc}"


def may_act_in(user: User, run: Run) -> bool:
    """Entering a run means to act as its owner, with its secrets: only the owner and the project's managers may."""
    role = role_in(run.project, user)
    return role is not None and may_change(role, run.user_id, user)


def may_open(user: User, run: Run) -> bool:
    """Whether the user may open what the run serves: a service is for all members, other pages for those who enter."""
    if run.spec.get("type") != RunType.SERVICE:
        return may_act_in(user, run)
    role = role_in(run.project, user)
    return role is not None and allows(role, "member")


def may_enter(user_id: int, run_id: int) -> bool:
    user = User.objects.filter(pk=user_id, is_active=True).first()
    run = Run.objects.select_related("project").filter(pk=run_id, status__in=ACTIVE).first()
    return user is not None and run is not None and may_act_in(user, run)


@dataclass(frozen=True)
class Visit:
    """A person at a run's pages. `proof` changes with their password."""

    user_id: int
    run_id: int
    proof: str


def proof_of(user: User) -> str:
    return user.get_session_auth_hash()[:32]


def ticket(user: User, run: Run) -> str:
    """A ticket for the run's pages, for one use within TICKET_S."""
    visit = Visit(user.pk, run.pk, proof_of(user))
    return signing.dumps({**asdict(visit), "nonce": secrets.token_urlsafe(12), "at": time.time()}, salt=TICKET_SALT)


def cookie(visit: Visit) -> str:
    return signing.dumps(asdict(visit), salt=COOKIE_SALT)


def read_cookie(value: str) -> Visit | None:
    try:
        return Visit(**signing.loads(value, salt=COOKIE_SALT, max_age=COOKIE_S))
    except (signing.BadSignature, TypeError):
        return None


def visitor(visit: Visit) -> User | None:
    """The person, if their account is active and their password is the one of then."""
    user = User.objects.filter(pk=visit.user_id, is_active=True).first()
    return user if user is not None and secrets.compare_digest(proof_of(user), visit.proof) else None


class Tickets:
    """The tickets that were taken. Those from before this process may have been taken by another one."""

    def __init__(self) -> None:
        self._began = time.time()
        self._taken: dict[str, float] = {}

    def take(self, text: str) -> Visit | None:
        """The visit that a ticket is for, the first time."""
        now = time.time()
        self._taken = {nonce: at for nonce, at in self._taken.items() if now - at <= 2 * TICKET_S}
        try:
            found = signing.loads(text, salt=TICKET_SALT, max_age=TICKET_S)
            nonce, issued_at = str(found.pop("nonce")), float(found.pop("at"))
            visit = Visit(**found)
        except (signing.BadSignature, TypeError, KeyError):
            return None
        if nonce in self._taken or issued_at < self._began:
            return None
        self._taken[nonce] = now
        return visit


def cookie_name() -> str:
    """With https a name that no page of another host can set a cookie of."""
    return "__Host-dstackweb-gateway" if is_secure() else "dstackweb-gateway"


def is_secure() -> bool:
    return str(settings.DSTACKWEB_GATEWAY_URL).startswith("https://")
