"""Settings that several people have open: only what somebody changed is saved."""

from __future__ import annotations

import pytest
from django import forms

from dstackweb.lib.forms import MergedForm
from dstackweb.profiles.models import Profile


class Settings(MergedForm, forms.Form):
    most = forms.IntegerField(required=False)
    paused = forms.BooleanField(required=False)


SHOWN = {"initial-most": "1", "initial-paused": "False"}


def saved(data: dict[str, str], most: int = 1, paused: bool = False) -> dict[str, object]:
    """What is saved of `data` where the settings are `most` and `paused` now."""
    form = Settings(data, initial={"most": most, "paused": paused})
    assert form.is_valid(), form.errors
    return form.changes


def test_a_setting_that_was_left_alone_is_not_saved() -> None:
    assert saved({**SHOWN, "most": "2"}) == {"most": 2}
    assert saved({**SHOWN, "most": "2"}, paused=True) == {"most": 2}
    assert saved({**SHOWN, "most": "1"}, most=5) == {}


def test_a_setting_that_was_emptied_is_saved() -> None:
    assert saved({**SHOWN, "most": ""}) == {"most": None}


@pytest.mark.parametrize("typed", ["", "2"])
def test_what_comes_without_the_value_that_was_shown_is_saved_as_it_is(typed: str) -> None:
    assert saved({"most": typed}, paused=True) == {"most": int(typed) if typed else None, "paused": False}


def test_a_setting_that_two_have_changed_is_refused() -> None:
    form = Settings({**SHOWN, "most": "2"}, initial={"most": 5, "paused": False})
    assert not form.is_valid()
    assert list(form.errors) == ["most"]


class New(MergedForm, forms.ModelForm[Profile]):
    class Meta:
        model = Profile
        fields = ("name",)


@pytest.mark.django_db
@pytest.mark.parametrize("typed", ["suggested", "other"])
def test_something_new_is_saved_as_it_was_sent_whatever_was_suggested(typed: str) -> None:
    assert "initial-name" not in str(New(initial={"name": "suggested"}))
    form = New({"name": typed, "initial-name": "suggested"})
    assert form.is_valid(), form.errors
    assert form.changes == {"name": typed}
