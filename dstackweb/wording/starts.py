"""When a waiting run starts, and what that rests on."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any, assert_never, cast

from django.utils.translation import get_language, gettext as _, ngettext

from dstackweb.runs.codes import StartBasis, StartData
from dstackweb.runs.row_fields import Starts
from dstackweb.wording import waiting
from dstackweb.wording.sentence import Label, Sentence, fill, joined


def basis(code: StartBasis, data: Mapping[str, Any]) -> Label:
    """The label is for a run without times: why it has none."""
    known = cast(StartData, data)
    match code:
        case StartBasis.NOW:
            return Label(_("now"), _("what it needs is free"), "go")
        case StartBasis.LEARNED:
            return Label(_("estimated"), joined(_("; "), filter(None, (_end(known), _learned(known)))), "info")
        case StartBasis.MAX_DURATION:
            return Label(
                _("estimated"), joined(_(", "), filter(None, (_end(known), _("from its max_duration")))), "info"
            )
        case StartBasis.NO_END:
            other = known.get("run") or _("a run ahead")
            return Label(_("no estimate"), fill(_("%(run)s has no max_duration and no history"), run=other), "info")
        case StartBasis.LIMIT:
            return Label(_("no estimate"), _("a limit of the queue holds it up"), "info")
        case StartBasis.PAUSED:
            return Label(_("paused"), _("the queue is paused"), "info")
        case StartBasis.IMPOSSIBLE:
            return Label(_("never"), _("nothing that is set up can run it"), "bad")
        case StartBasis.UNAVAILABLE:
            return Label(_("no estimate"), waiting.reason(known.get("reason", ""), {}).label, "info")
        case StartBasis.ELSEWHERE:
            return Label(_("no estimate"), _("it depends on what clouds or clusters have"), "info")
        case StartBasis.AFTER_RUNS:
            return Label(_("after others"), _("it waits for other runs to end"), "info")
        case StartBasis.SCHEDULED:
            return Label(_("scheduled"), _("it enters its queue at a set time"), "info")
        case StartBasis.UNKNOWN:
            return Label(_("estimating"), _("the next estimate includes it"), "info")
        case never:
            assert_never(never)


def _end(data: StartData) -> Sentence:
    return fill(_("after %(run)s ends"), run=data["run"]) if data.get("run") else Sentence(_("after a run ahead ends"))


def _learned(data: StartData) -> str:
    count = data.get("runs", 0)
    text = ngettext("learned from %(n)d run of %(prefix)s", "learned from %(n)d runs of %(prefix)s", count)
    return text % {"n": count, "prefix": data.get("prefix", "")}


def add_words(found: Iterable[tuple[Starts, Mapping[str, Any]]]) -> None:
    """Set the `detail` of these, each with the data of its basis."""
    language = get_language()
    for starts, data in found:
        starts.detail = _detail(starts.basis, tuple(data.items()), language)


@functools.lru_cache(1024)
def _detail(code: StartBasis, data: tuple[tuple[str, Any], ...], _language: str) -> str:
    """Many rows of a list say the same, and each of its texts would be looked up: a fifth of a list's time."""
    return str(basis(code, dict(data)).text)
