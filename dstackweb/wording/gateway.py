"""What the gateway answers where it can't pass on what a job says, how services are, and why their checks fail."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, assert_never

from django.utils.translation import gettext as _, gettext_lazy

from dstackweb.runs.service_codes import CheckFailure, GatewayProblem, ServiceState
from dstackweb.wording.sentence import Label, as_text, known, words
from dstackweb.wording.statuses import status
from dstackweb.wording.units import exact_duration

service_state = words(
    {
        ServiceState.STARTING: gettext_lazy("starting"),
        ServiceState.HEALTHY: gettext_lazy("healthy"),
        ServiceState.UNHEALTHY: gettext_lazy("unhealthy"),
        ServiceState.UNKNOWN: gettext_lazy("unknown"),
    }
)


def check_failure(code: str, data: Mapping[str, Any]) -> str:
    """Why the last check failed; empty if it did not."""
    if not code:
        return ""
    failure = known(CheckFailure, code)
    match failure:
        case CheckFailure.REFUSED:
            return str(_("nothing listens on port %s") % data.get("port", ""))
        case CheckFailure.FOREIGN:
            return str(_("another user's process listens on port %s of its host") % data.get("port", ""))
        case CheckFailure.TIMEOUT:
            return _("no answer within %s") % exact_duration(int(data.get("timeout_s") or 0))
        case CheckFailure.STATUS:
            return str(_("it answers with status %s") % data.get("status", ""))
        case CheckFailure.NO_HTTP:
            return _("it closes the connection without an HTTP answer")
        case CheckFailure.UNREACHABLE:
            return str(_("its runner can't connect to it: %s") % data.get("text", ""))
        case None:
            return as_text(code)
        case never:
            assert_never(never)


def problem(code: GatewayProblem, data: Mapping[str, Any]) -> Label:
    """A title, and what happened, what is safe and what to do."""
    values = {"name": data.get("name", ""), "port": data.get("port", ""), "status": status(data.get("status", ""))}
    title, text = _problem(code)
    return Label(str(title) % values, str(text) % values, "bad")


def _problem(code: GatewayProblem) -> tuple[str, str]:
    match code:
        case GatewayProblem.NO_RUN:
            return _("Not found"), _("No run has this host name, or you are not a member of its project.")
        case GatewayProblem.SIGN_IN:
            text = _("Open this from the page of the run, or send an API token as `Authorization: Bearer …`.")
            return _("Sign in first"), text
        case GatewayProblem.BAD_TOKEN:
            text = _("The API token is not valid: it is unknown, revoked or expired. Make one under API tokens.")
            return _("Invalid token"), text
        case GatewayProblem.TOO_MANY_FAILURES:
            text = _("Too many wrong tokens came from your address. Valid ones still work; others are tried later.")
            return _("Too many wrong tokens"), text
        case GatewayProblem.NO_ACCESS:
            text = _("%(name)s is open to the project's members, not to viewers and tokens that may only read.")
            return _("No access to %(name)s"), text
        case GatewayProblem.TOKENS_NOT_TAKEN:
            text = _("%(name)s is not a service, so API tokens don't open it. Open it from its page.")
            return _("No access to %(name)s"), text
        case GatewayProblem.OTHER_ORIGIN:
            text = _("A page of another site sent this request. It was not passed on.")
            return _("Refused"), text
        case GatewayProblem.NOT_STARTED:
            text = _("It is %(status)s. The request was not passed on. Try again once it runs.")
            return _("%(name)s has not started"), text
        case GatewayProblem.ENDING:
            text = _("It is being stopped. The request was not passed on. If it is queued again, try again later.")
            return _("%(name)s is stopping"), text
        case GatewayProblem.ENDED:
            text = _("It has ended (%(status)s). The request was not passed on. Submit it again to use it.")
            return _("%(name)s has ended"), text
        case GatewayProblem.DISCONNECTED:
            text = _("Its runner is not connected to the server. The run goes on. Try again in a few seconds.")
            return _("%(name)s can't be reached now"), text
        case GatewayProblem.NOT_LISTENING:
            text = _("Nothing listens on its port yet. The run goes on. Try again soon, or see its log.")
            return _("%(name)s is not listening"), text
        case GatewayProblem.OTHER_USERS_PORT:
            text = _(
                "Another user's process has port %(port)s of its host. The request was not passed on. "
                "Use another port in the run file, and submit it again."
            )
            return _("The port of %(name)s is taken"), text
        case GatewayProblem.UNREACHABLE:
            text = _("Its runner can't connect to it. The run goes on. Try again, or see its log.")
            return _("%(name)s can't be reached now"), text
        case GatewayProblem.BUSY:
            text = _("Too many requests are open at once. This one was not passed on. Try again soon.")
            return _("%(name)s is busy"), text
        case GatewayProblem.NO_ANSWER:
            text = _(
                "It closed the connection before it answered. The run goes on. "
                "It may have handled the request: repeat it only if that is safe."
            )
            return _("%(name)s did not answer"), text
        case never:
            assert_never(never)
