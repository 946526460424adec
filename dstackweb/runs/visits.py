"""Who may enter a run, and the tickets and cookies of its pages, which the gateway serves.

A run's pages are an origin of their own, with a cookie of their own. The dashboard gives a ticket, which the gateway
takes once, in exchange for the cookie. Neither opens anything else.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import asdict, dataclass

from django.conf import settings
from django.core import signing

from dstackweb.accounts.access import allows, may_change, role_in
from dstackweb.accounts.models import User
from dstackweb.runs.models import Run
from dstackweb.runs.states import ACTIVE
from dstackweb.spec.codes import RunType

TICKET_S, COOKIE_S = 30, 12 * 3600
TICKET_SALT, COOKIE_SALT = "dstackweb.gateway.ticket", "dstackweb.gateway.cookie"
ENTER = "/.dstackweb/enter"


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
    """Whether the user may enter the run now."""
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
