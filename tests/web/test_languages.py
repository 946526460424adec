"""Only languages with a complete catalogue are offered."""

from pathlib import Path

import pytest
from django.conf import settings
from django.test import Client
from django.utils.translation import to_locale


def test_every_language_but_english_has_a_complete_catalogue():
    for code, _ in settings.LANGUAGES:
        if code == "en":
            continue
        catalogue = Path(settings.LOCALE_PATHS[0], to_locale(code), "LC_MESSAGES", "django.po").read_text()
        assert "#, fuzzy" not in catalogue, code
        assert not [entry for entry in catalogue.split("\n\n")[1:] if entry.rstrip().endswith('msgstr ""')], code


@pytest.mark.django_db
def test_a_browser_in_a_language_without_a_catalogue_gets_english_throughout():
    page = Client().get("/login/", headers={"accept-language": "zh-CN,zh;q=0.9"})
    assert page.status_code == 200
    assert page.headers["Content-Language"] == "en"
    assert '<html lang="en"' in page.text
    assert not [letter for letter in page.text if "一" <= letter <= "鿿"]
