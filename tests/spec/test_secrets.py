"""References to project secrets in `env`."""

from __future__ import annotations

import pytest

from dstackweb.lib.errors import Invalid
from dstackweb.spec.env import fill_secrets, secret_names

ENV = {"A": "plain", "B": "${{ secrets.KEY }}", "C": "x-${{secrets.KEY}}-${{ secrets.OTHER_1 }}"}


def test_the_secrets_a_run_needs_are_named() -> None:
    assert secret_names(ENV) == {"KEY", "OTHER_1"}


def test_references_are_filled_in_and_the_rest_is_kept() -> None:
    assert fill_secrets(ENV, {"KEY": "k", "OTHER_1": "o", "UNUSED": "u"}) == {"A": "plain", "B": "k", "C": "x-k-o"}


def test_a_value_that_looks_like_a_reference_is_not_filled_in_again() -> None:
    value = r"\1 ${{ secrets.OTHER_1 }}"
    assert fill_secrets({"B": ENV["B"]}, {"KEY": value, "OTHER_1": "o"}) == {"B": value}


def test_missing_secrets_are_refused_by_name() -> None:
    with pytest.raises(Invalid, match="OTHER_1") as caught:
        fill_secrets(ENV, {"KEY": "k"})
    assert caught.value.errors[0]["loc"] == ["env"]
