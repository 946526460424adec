"""A page's heading is its title too."""

from __future__ import annotations

import pytest
from django.template import Context, Template
from django.test import Client

from dstackweb.accounts import services
from tests.factories import join, make_project, make_user


@pytest.mark.django_db
def test_a_heading_is_escaped_once() -> None:
    project, ada = make_project("r&d"), make_user("ada")
    join(project, ada, "admin")
    _invite, token = services.invite(project, ada, "member")
    text = Client().get(f"/invite/{token}/").content.decode()
    assert '<h1 class="h2">Join r&amp;d</h1>' in text


def test_a_title_is_the_heading_escaped_once() -> None:
    template = "{% load dstackweb_tags %}{% heading as title %} {{ name }} {% endheading %}<title>{{ title }}</title>"
    assert Template(template).render(Context({"name": "a<b"})) == "<title>a&lt;b</title>"


def test_a_kpi_escapes_its_values_and_keeps_its_note() -> None:
    template = '{% load dstackweb_tags %}{% kpi "Runs" name %}<b>{{ name }}</b>{% endkpi %}'
    text = Template(template).render(Context({"name": "a<b"}))
    assert '<div class="kpi">a&lt;b</div>' in text
    assert "<b>a&lt;b</b>" in text
