"""What is sent: signed for programs, without markup of others for people."""

from __future__ import annotations

import datetime as dt
import json
import uuid

import pytest

from dstackweb.notifications import messages
from dstackweb.notifications.messages import Notice
from dstackweb.notifications.models import Delivery

AT = dt.datetime(2031, 5, 4, 9, 30, tzinfo=dt.UTC)


def one(title: str = "train: failed", text: str = "", url: str = "https://gpus.example.org/x") -> Notice:
    return Notice(uuid.uuid4(), "run_failed", AT, "main", title, text, "bad", url, {"run": "train"})


def test_the_signature_is_that_of_the_specification_s_example() -> None:
    """The example of github.com/standard-webhooks/standard-webhooks."""
    key, body = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", b'{"test": 2432232314}'
    signature = messages.sign(key, "msg_p5jXN8AQM9LWM0D4loKWxJek", "1614265330", body)
    assert signature == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_a_run_s_name_or_message_cannot_address_a_whole_slack_channel() -> None:
    text = json.loads(messages.slack([one("a<!channel>", "<https://evil.example|click> & more")]).body)["text"]
    assert "<!channel>" not in text
    assert "&lt;https://evil.example|click&gt; &amp; more" in text
    assert text.startswith("<https://gpus.example.org/x|*a&lt;!channel&gt;*>")


def test_characters_that_hide_or_turn_text_are_shown_by_their_number() -> None:
    data = {"run": "a\u202eb", "status": "failed", "reason": "failed", "message": "one\u200b\n\ntwo\x1b[31m"}
    delivery = Delivery(event="run_failed", data={"kind": "failed", "data": {}, **data})
    found = messages.notice(delivery, "")
    assert not set("\u202e\u200b\x1b") & set(found.title + found.text)
    assert "202E" in found.title.upper()


def test_teams_gets_plain_text_runs() -> None:
    card = json.loads(messages.teams([one("[a](https://evil.example)")]).body)["attachments"][0]["content"]
    (block,) = card["body"]
    assert block["type"] == "RichTextBlock"
    assert block["inlines"][0]["text"] == "[a](https://evil.example)"
    assert block["inlines"][0]["selectAction"]["url"] == "https://gpus.example.org/x"


@pytest.mark.parametrize("text", ["x" * messages.MAX_TEXT, "错" * messages.MAX_TEXT, '"' * messages.MAX_TEXT])
def test_many_long_notifications_fit_into_one_message_to_slack_or_teams(text: str) -> None:
    """Teams refuses messages from 28 KB on, and Slack cuts off what is over 40,000 characters."""
    found = [one("r" * 60 + ": failed", text)] * 20
    for post in (messages.slack(found), messages.teams(found)):
        assert len(post.body) < 28_000
        assert post.body.count(b": failed") == 20
    assert text in json.loads(messages.slack(found[:1]).body)["text"]


def test_a_mail_names_what_it_is_about_in_its_subject() -> None:
    assert messages.subject([one()]) == "[main] train: failed"
    assert messages.subject([one(), one()]) == "2 notifications: train: failed and others"
    assert "https://gpus.example.org/x" in messages.mail_text([one()])
