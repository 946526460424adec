"""Labels: what may be one, how a run asks for them, and which hosts have them (R25)."""

from __future__ import annotations

import pytest

from dstackweb.lib.errors import Invalid
from dstackweb.profiles.resolve import ProfileData, resolve
from dstackweb.spec.labels import check_labels, match, read_pair, shown
from dstackweb.spec.run_file import parse_profile_settings, parse_run_file


def asked(labels: object) -> object:
    spec = resolve(parse_run_file({"type": "task", "commands": ["a"], "labels": labels}), None).spec
    return spec.labels


def test_a_run_requires_one_value_or_one_of_several() -> None:
    assert asked({"disk": "nvme", "region": ["eu", "us", "eu"]}) == {"disk": ("nvme",), "region": ("eu", "us")}


def test_a_number_is_a_text() -> None:
    assert asked({"rack": 4}) == {"rack": ("4",)}


def test_the_settings_show_them_as_they_are_written() -> None:
    file = parse_run_file({"type": "task", "commands": ["a"], "labels": {"disk": "nvme", "region": ["eu", "us"]}})
    effective = resolve(file, None)
    assert effective.spec.as_file()["labels"] == {"disk": "nvme", "region": ["eu", "us"]}
    assert effective.provenance["labels"]["source"] == "run_file"


def test_a_profile_may_require_labels() -> None:
    profile = ProfileData("nightly", parse_profile_settings({"labels": {"region": "eu"}}))
    effective = resolve(parse_run_file({"type": "task", "commands": ["a"]}), profile)
    assert effective.spec.labels == {"region": ("eu",)}
    assert effective.provenance["labels"] == {"source": "profile", "profile": "nightly"}


@pytest.mark.parametrize(
    "labels",
    [["disk"], {}, {"disk": []}, {"disk": True}, {"disk": ""}, {"-x": "a"}, {"a b": "c"}, {"a": "b\nc"}, "a=b"],
)
def test_an_invalid_label_is_refused_with_its_key(labels: object) -> None:
    with pytest.raises(Invalid, match="`labels"):
        asked(labels)


def test_a_refusal_has_its_line() -> None:
    with pytest.raises(Invalid) as caught:
        parse_run_file("type: task\ncommands: [a]\nlabels:\n  disk: nvme\n  a b: c\n")
    assert caught.value.errors[0]["line"] == 3
    assert "'a b' is not a valid label name" in caught.value.detail


@pytest.mark.parametrize(
    ("asks", "has", "fits"),
    [
        (None, {}, True),
        ({"disk": ("nvme",)}, {"disk": "nvme", "x": "y"}, True),
        ({"disk": ("nvme",)}, {}, False),
        ({"disk": ("nvme", "ssd")}, {"disk": "ssd"}, True),
        ({"disk": ("nvme",), "region": ("eu",)}, {"disk": "nvme", "region": "us"}, False),
    ],
)
def test_all_must_match(asks: dict[str, tuple[str, ...]] | None, has: dict[str, str], fits: bool) -> None:
    assert match(asks, has) is fits


def test_required_labels_are_shown_as_they_are_typed() -> None:
    assert shown({"region": ("eu", "us"), "disk": ("nvme",)}) == ["disk=nvme", "region=eu|us"]
    assert shown(None) == []


def test_a_label_is_typed_with_an_equals_sign() -> None:
    assert read_pair("region = eu=1") == ("region", "eu=1")
    with pytest.raises(ValueError, match="not a label such as"):
        read_pair("region")


@pytest.mark.parametrize(
    "labels", [[], {"a": 1.5}, {"a": {}}, {"a": None}, {"": "a"}, {"a" * 64: "b"}, {"a": "b" * 101}]
)
def test_a_host_accepts_only_text_labels(labels: object) -> None:
    with pytest.raises(ValueError, match="label"):
        check_labels(labels)
    assert check_labels({"nvidia.com/driver": "570"}) == {"nvidia.com/driver": "570"}
