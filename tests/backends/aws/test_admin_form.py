"""An AWS backend's configuration as the fields of a form, and back."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.exceptions import ValidationError
from hypothesis import given, strategies as st

from dstackweb.backends.aws import admin_form, config
from dstackweb.backends.aws.kind import AwsKind
from dstackweb.backends.forms import BackendForm, schema_form

REGIONS = ["eu-west-1", "us-east-1", "cn-north-1"]
ids = st.from_regex(r"(subnet|sg|ami)-[0-9a-f]{8}", fullmatch=True)
names = st.from_regex(r"[A-Za-z][\w+=.@-]{0,20}", fullmatch=True)
lists = st.lists(ids, min_size=1, max_size=3, unique=True)


def by_region(one: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return one | st.dictionaries(st.sampled_from(["*", *REGIONS]), one, min_size=1)


configs = st.fixed_dictionaries(
    {"regions": st.permutations(REGIONS)},
    optional={
        "credentials": st.sampled_from(
            [
                "default",
                {"profile": "gpus"},
                {"role_arn": "arn:aws:iam::123456789012:role/dw", "external_id": "x 1"},
            ]
        ),
        "families": st.lists(st.sampled_from(["g5", "p5", "u-6tb1"]), min_size=1, unique=True),
        "instance_types": st.just(["g5.xlarge"]),
        "architectures": st.lists(st.sampled_from(["x86_64", "arm64"]), min_size=1, unique=True),
        "subnets": by_region(lists),
        "security_groups": by_region(lists),
        "instance_profile": by_region(names | st.just("arn:aws:iam::123456789012:instance-profile/dw")),
        "ami": by_region(ids),
        "ssh_key": by_region(names),
        "tags": st.dictionaries(names.filter(lambda name: "=" not in name), names, max_size=3),
        "public_ip": st.booleans(),
        "containers": st.booleans(),
        "disk_gb": st.integers(8, 16384),
        "allow_private_url": st.booleans(),
        "endpoint_url": st.just("http://127.0.0.1:5000"),
    },
)


class NamedForm(admin_form.AwsForm):
    """Without the check of the name, which reads rows."""

    def clean_name(self) -> str:
        return "aws"


Form = schema_form(AwsKind(), NamedForm)


def sent_back(stored: dict[str, Any]) -> BackendForm:
    """The form as it shows a stored config, sent back as it is."""
    shown = Form(initial=Form().initial_values(stored))
    data = {name: shown[name].value() for name in shown.fields}
    return Form({**data, "name": "aws"})


def field(name: str) -> Any:
    return Form().fields[name]


@given(configs)
def test_a_form_submitted_unchanged_keeps_the_configuration(said: dict[str, Any]) -> None:
    kept, _ = config.settle(said)
    form = sent_back(kept)
    assert form.is_valid(), form.errors
    before, after = config.read(kept), config.read(form.config)
    assert set(after.regions) == set(before.regions)
    assert after == before.model_copy(update={"regions": after.regions})


def test_a_setting_that_differs_by_region_has_a_line_per_region() -> None:
    text = "eu-west-1: subnet-1, subnet-2\nus-east-1:subnet-3\n"
    assert field("subnets").clean(text) == {"eu-west-1": ["subnet-1", "subnet-2"], "us-east-1": ["subnet-3"]}
    assert field("subnets").clean("subnet-1 subnet-2") == ["subnet-1", "subnet-2"]
    assert field("ami").clean("ami-1\neu-west-1: ami-2") == {"*": "ami-1", "eu-west-1": "ami-2"}
    assert field("ami").clean(" \n") == ""


@pytest.mark.parametrize("text", ["eu-west-1:", "eu-west-1: ami-1 ami-2", "ami-1 ami-2", "ami-1\nami-2"])
def test_ambiguous_input_is_refused(text: str) -> None:
    with pytest.raises(ValidationError, match="Enter"):
        field("ami").clean(text)


@pytest.mark.parametrize("text", ["team", "=x"])
def test_a_tag_has_a_name_and_a_value(text: str) -> None:
    with pytest.raises(ValidationError, match="name=value"):
        field("tags").clean(text)


def test_regions_have_names_and_areas() -> None:
    areas = dict(field("regions").choices)
    assert ("eu-west-1", "eu-west-1 Europe (Ireland)") in areas["Europe"]
    assert sum(map(len, areas.values())) == len(config.region_names()) > 30
