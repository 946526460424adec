"""Settings and the fields of the form become each other without a change of meaning."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from dstackweb.profiles.admin import SETTINGS, assembled, fits_form, values_of
from dstackweb.spec.run_file import parse_profile_settings

NAMES = st.lists(st.sampled_from(["hosts", "aws", "eu-west-1"]), min_size=1, max_size=3, unique=True)
SETTINGS_OF_PROFILES = st.fixed_dictionaries(
    {},
    optional={
        "backends": NAMES,
        "regions": NAMES,
        "labels": st.dictionaries(
            st.sampled_from(["disk", "site"]),
            st.sampled_from(["nvme", "ssd"]) | st.just(["eu", "us"]),
            min_size=1,
        ),
        "spot_policy": st.sampled_from(["spot", "on-demand", "auto"]),
        "max_price": st.sampled_from([0, 1, 1.5]),
        "max_duration": st.sampled_from(["24h", "off", False, 3600]),
        "image": st.just("python:3.12"),
        "retry": st.booleans() | st.just({"duration": "2h", "on_events": ["error"], "max_attempts": 3}),
        "utilization_policy": st.fixed_dictionaries(
            {"min_gpu_utilization": st.integers(0, 100), "time_window": st.just("30m")},
            optional={"scope": st.just("all"), "warmup": st.just("10m"), "action": st.just("notify")},
        ),
        "schedule": st.sampled_from([{"cron": "0 2 * * *"}, {"cron": ["0 2 * * *", "0 4 * * 1"]}]),
    },
)


@given(SETTINGS_OF_PROFILES)
def test_the_form_gives_back_what_it_was_given(settings: dict[str, Any]) -> None:
    assert fits_form(settings)
    texts = values_of(settings)
    values = {name: SETTINGS[name].read(text) for name, text in texts.items() if name in SETTINGS}
    again = assembled({**values, "retry": texts.get("retry", "")})
    assert parse_profile_settings(again) == parse_profile_settings(settings)


@pytest.mark.parametrize("settings", [{"utilization_policy": None}, {"max_duration": "soon"}, {"labels": "x"}])
def test_other_settings_are_left_to_the_notation_of_the_run_file(settings: dict[str, Any]) -> None:
    assert not fits_form(settings)
