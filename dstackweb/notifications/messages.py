"""What is sent to each kind of channel. Pure.

Webhooks follow Standard Webhooks (https://www.standardwebhooks.com): a JSON object with `type`, `timestamp` and `data`,
and a signature over id, time and body. Slack gets `text`, with the characters escaped that it reads as markup; Teams
gets an adaptive card, whose text runs have no markup.
"""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import hmac
import json
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import urljoin
from uuid import UUID

from django.urls import reverse
from django.utils.translation import gettext as _

from dstackweb.notifications.models import Delivery
from dstackweb.runs.notification_codes import NotificationEvent
from dstackweb.wording import notifications as words
from dstackweb.wording.sentence import visible

FACTS = (
    "run", "status", "reason", "waited_s", "by", "queue", "code", "waiting", "backend", "region", "host", "percent",
    "spent", "budget",
)  # fmt: skip
"""Of a notification's data, what programs get as it is."""
MAX_TEXT = 2000
"""Characters of one notification: error messages may be long."""
MAX_CHAT_BYTES = 10_000
"""Of all texts in one message to Slack or Teams, which refuses more than 28 KB; a quotation mark takes two bytes."""
TONES = {"go": "Good", "bad": "Attention", "wait": "Warning"}


class Post(NamedTuple):
    """A request, but for its address."""

    headers: dict[str, str]
    body: bytes


class Notice(NamedTuple):
    """A notification as people and programs read it. `url` is empty where the server's address is not known."""

    uid: UUID
    event: str
    at: dt.datetime
    project: str
    title: str
    text: str
    tone: str
    url: str
    facts: dict[str, Any]


def notice(delivery: Delivery, server_url: str) -> Notice:
    """`server_url`: the server's address, without a slash at its end; may be empty."""
    label = words.notification(delivery.event, delivery.data)
    facts = {name: delivery.data[name] for name in FACTS if delivery.data.get(name) is not None}
    if delivery.run_uid is not None:
        facts["run_id"] = str(delivery.run_uid)
    return Notice(
        uid=delivery.uid,
        event=delivery.event,
        at=delivery.at,
        project=delivery.project.name if delivery.project else "",
        title=visible(" ".join(str(label.label).split())),
        text=_short(str(label.text)),
        tone=label.tone,
        url=urljoin(server_url, path_of(delivery)) if server_url else "",
        facts=facts,
    )


def path_of(delivery: Delivery) -> str:
    """The page about it on this server."""
    if delivery.project is None:
        return reverse("notifications" if delivery.event == NotificationEvent.TEST else "health")
    if delivery.run_uid is not None:
        return reverse("web:run", args=[delivery.project.name, delivery.run_uid])
    if delivery.event == NotificationEvent.BUDGET_SPENT:
        return reverse("web:instances", args=[delivery.project.name])
    return reverse("web:queue", args=[delivery.project.name, delivery.data.get("queue") or "default"])


def webhook(one: Notice, key: str, now: dt.datetime) -> Post:
    """A signed request for a program. `key`: `whsec_` and base64."""
    data = {**one.facts, "project": one.project, "title": one.title, "text": one.text, "url": one.url}
    body = _json({"type": one.event, "timestamp": one.at.isoformat(), "data": data})
    uid, timestamp = str(one.uid), str(int(now.timestamp()))
    headers = {"webhook-id": uid, "webhook-timestamp": timestamp, "webhook-signature": sign(key, uid, timestamp, body)}
    return Post({**headers, "Content-Type": "application/json", "User-Agent": "dstackweb"}, body)


def sign(key: str, uid: str, timestamp: str, body: bytes) -> str:
    """`v1,` and the HMAC-SHA256 of `id.timestamp.body` in base64."""
    secret = base64.b64decode(key.removeprefix("whsec_"))
    digest = hmac.new(secret, b".".join((uid.encode(), timestamp.encode(), body)), hashlib.sha256).digest()
    return "v1," + base64.b64encode(digest).decode()


def slack(found: Sequence[Notice]) -> Post:
    return _post({"text": "\n".join(map(_slack_lines, _for_chat(found))), "unfurl_links": False})


def _for_chat(found: Sequence[Notice]) -> list[Notice]:
    """With texts that fit into one message together."""
    most = MAX_CHAT_BYTES // len(found)
    cut = [one.text.encode()[:most].decode(errors="ignore") for one in found]
    return [one._replace(text=text if text == one.text else text + "…") for one, text in zip(found, cut, strict=True)]


def _slack_lines(one: Notice) -> str:
    title = f"*{_for_slack(one.title)}*"
    if one.url:
        title = f"<{one.url}|{title}>"
    where = f" ({_for_slack(one.project)})" if one.project else ""
    return f"{title}{where}\n{_for_slack(one.text)}".rstrip()


def _for_slack(text: str) -> str:
    """As text: `<!channel>` and links need angle brackets."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def teams(found: Sequence[Notice]) -> Post:
    card = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "type": "AdaptiveCard",
        "version": "1.4",
        "body": [_teams_block(one) for one in _for_chat(found)],
    }
    return _post(
        {
            "type": "message",
            "attachments": [{"contentType": "application/vnd.microsoft.card.adaptive", "content": card}],
        }
    )


def _teams_block(one: Notice) -> dict[str, Any]:
    title: dict[str, Any] = {"type": "TextRun", "text": one.title, "weight": "Bolder"}
    if one.tone in TONES:
        title["color"] = TONES[one.tone]
    if one.url:
        title["selectAction"] = {"type": "Action.OpenUrl", "url": one.url}
    more = " ".join(filter(None, (f"({one.project})" if one.project else "", one.text)))
    runs = [title, *([{"type": "TextRun", "text": f" {more}"}] if more else [])]
    return {"type": "RichTextBlock", "separator": True, "inlines": runs}


def subject(found: Sequence[Notice]) -> str:
    """Of a mail."""
    if len(found) == 1:
        return f"[{found[0].project}] {found[0].title}" if found[0].project else found[0].title
    return _("%d notifications: %s and others") % (len(found), found[0].title)


def mail_text(found: Sequence[Notice], channel_url: str = "") -> str:
    """`channel_url`: the page on which these mails are turned off, if the server's address is known."""
    parts = ["\n".join(filter(None, (one.title, one.text, one.url))) for one in found]
    if channel_url:
        parts.append(_("To choose or turn off these mails: %s") % channel_url)
    return "\n\n".join(parts) + "\n"


def _short(text: str) -> str:
    """Without characters that hide or turn others, line by line."""
    lines = [visible(line) if line.strip() else "" for line in text[:MAX_TEXT].splitlines()]
    return "\n".join(lines) + ("…" if len(text) > MAX_TEXT else "")


def _post(payload: dict[str, Any]) -> Post:
    return Post({"Content-Type": "application/json", "User-Agent": "dstackweb"}, _json(payload))


def _json(payload: dict[str, Any]) -> bytes:
    return json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode()
