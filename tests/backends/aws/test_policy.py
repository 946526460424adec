"""The policy is the same in the test of a connection and in the docs."""

from __future__ import annotations

import json
import re
from pathlib import Path

from dstackweb.backends.aws import check_words

DOCS = Path(__file__).resolve().parents[3] / "docs" / "aws.md"
PASSING = "iam:PassRole"
EVERY_ACTION = (*check_words.READING, *check_words.STARTING, PASSING)


def test_the_docs_show_the_policy_and_name_no_other_permission() -> None:
    text = DOCS.read_text()
    assert check_words.policy_document((*check_words.READING, *check_words.STARTING)) in text
    named = set(re.findall(r"`((?:ec2|iam|pricing|servicequotas|ssm):\w+)`", text))
    assert named <= set(EVERY_ACTION)


def test_no_policy_allows_passing_or_creating_arbitrary_roles() -> None:
    given = json.loads(check_words.policy_document(EVERY_ACTION))["Statement"]
    assert all(one["Resource"] != "*" for one in given if "iam:" in str(one["Action"]))
    only = json.loads(check_words.policy_document([PASSING]))["Statement"]
    assert [one["Action"] for one in only] == [PASSING]
