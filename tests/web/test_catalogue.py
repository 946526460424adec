"""The catalogues of translations are complete, current and fit the texts they translate."""

from __future__ import annotations

import gettext
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from babel.messages.catalog import Catalog, Message
from babel.messages.pofile import read_po
from django.conf import settings
from django.template.base import Lexer, TokenType
from django.utils.translation import to_locale

from dstackweb.backends import registry
from dstackweb.spec.fields import Keys
from dstackweb.spec.run_fields import RunFields
from dstackweb.spec.wording import expected, keys_at
from tools import messages

LOCALES = [to_locale(code) for code, _name in settings.LANGUAGES if code != "en"]
BLOCK = re.compile(r"\s*(blocktrans(?:late)?|comment|endblocktrans(?:late)?|endcomment)\b")
EXAMPLE = "type: task&#10;commands:&#10;  - echo hello"
SPOKEN = re.compile(r'\b(?:aria-label|aria-description|title|placeholder|alt)="([^"]*)"')
UNSPOKEN = re.compile(r"<(script|style|code|kbd|pre)\b.*?</\1>|<!--.*?-->", re.DOTALL)
HOLDERS = re.compile(r"%\(\w+\)[sdf]|%[sd]|%%|\{[\w.!:,]*\}")
TAGS = re.compile(r"</?\w+[^>]*>")
SAME_EVERYWHERE = {"CSV", "JSON", "HTTP", "SHA-256", "dstackweb", "secrets.", EXAMPLE}
"""Names, and what is typed as it stands."""


def path_of(locale: str) -> Path:
    return Path(settings.LOCALE_PATHS[0], locale, "LC_MESSAGES", "django.po")


def catalogue(locale: str) -> Catalog:
    with path_of(locale).open("rb") as file:
        return read_po(file, locale=locale)


def texts(entry: Message) -> list[str]:
    """In English: one, or the singular and the plural."""
    return [entry.id] if isinstance(entry.id, str) else list(entry.id)


def translations(entry: Message) -> list[str]:
    return [entry.string] if isinstance(entry.string, str) else list(entry.string)


def entries(found: Catalog) -> list[Message]:
    return [entry for entry in found if entry.id]  # without the header


def keys(found: Catalog) -> set[tuple[str | None, str]]:
    return {(entry.context, "|".join(texts(entry))) for entry in entries(found)}


def all_expected(schema: type[Keys]) -> Iterator[str]:
    """What the keys of a mapping should be, and those of the mappings in it."""
    for name, info in schema.model_fields.items():
        yield expected(info)
        if inner := keys_at(schema, (name,)):
            yield from all_expected(inner)


@pytest.mark.parametrize("schema", [RunFields, *(kind.schema for kind in registry.KINDS.values())])
def test_errors_say_what_a_setting_should_be_in_each_language(schema: type[Keys]) -> None:
    texts_there = {text for entry in entries(catalogue(LOCALES[0])) for text in texts(entry)}
    assert set(all_expected(schema)) - texts_there == set()


@pytest.mark.parametrize("locale", LOCALES)
def test_each_text_has_a_translation_that_nobody_doubts(locale: str) -> None:
    found = catalogue(locale)
    assert [entry.id for entry in entries(found) if entry.fuzzy or not all(translations(entry))] == []
    assert not found.obsolete


@pytest.mark.skipif(shutil.which("xgettext") is None, reason="GNU gettext is not installed")
def test_the_catalogue_has_the_texts_of_the_code_as_it_is_now(tmp_path: Path) -> None:
    """`make messages` brings it up to date."""
    now, kept = keys(messages.extracted(tmp_path)), keys(catalogue(messages.LANGUAGE))
    assert (now - kept, kept - now) == (set(), set())


@pytest.mark.parametrize("locale", LOCALES)
def test_what_the_server_reads_is_made_of_the_catalogue(locale: str) -> None:
    with path_of(locale).with_suffix(".mo").open("rb") as file:
        compiled = gettext.GNUTranslations(file)
    for entry in entries(catalogue(locale)):
        first, *plural = texts(entry)
        if entry.context:
            found = compiled.pgettext(entry.context, first)
        else:
            found = compiled.ngettext(first, *plural, 2) if plural else compiled.gettext(first)
        assert found == translations(entry)[-1], first


@pytest.mark.parametrize("locale", LOCALES)
def test_translations_have_the_places_and_tags_of_their_texts(locale: str) -> None:
    by_place = re.compile("%[sd]")
    for entry in entries(catalogue(locale)):
        sources = texts(entry)
        for text in translations(entry):
            assert Counter(HOLDERS.findall(text)) in [Counter(HOLDERS.findall(one)) for one in sources], text
            assert by_place.findall(text) in [by_place.findall(one) for one in sources], text
            assert Counter(TAGS.findall(text)) == Counter(TAGS.findall(sources[0])), text


def unmarked(source: str) -> Iterator[str]:
    """The words of a template that stand outside of tags that translate."""
    parts, inside = [], ""
    for token in Lexer(source).tokenize():
        block = BLOCK.match(token.contents) if token.token_type == TokenType.BLOCK else None
        if block is not None:
            inside = "" if block[1].startswith("end") else block[1]
        if token.token_type == TokenType.TEXT and not inside:
            parts.append(token.contents)
        elif token.token_type != TokenType.TEXT:
            parts.append(" ")
    html = UNSPOKEN.sub("", "".join(parts))
    for text in (*SPOKEN.findall(html), *re.sub(r"<[^>]*>", "\n", html).split("\n")):
        words = re.sub(r"&\w+;", " ", text).strip(" ·$:")
        if re.search("[A-Za-z]{2}", words) and words not in SAME_EVERYWHERE:
            yield words


def test_templates_have_no_text_outside_of_what_is_translated() -> None:
    assert list(unmarked('<p title="A title">Some {% trans "x" %}</p>')) == ["A title", "Some"]
    folder = Path(settings.ASSETS_DIR) / "templates"
    found = {path.name: words for path in folder.rglob("*.html") if (words := list(unmarked(path.read_text())))}
    assert found == {}


def test_scripts_say_only_what_the_server_translated() -> None:
    """A sentence in a script is two words in quotes, but for selectors, types and names of events."""
    sentence = re.compile(r"""(["'`])([A-Z][a-z]+(?: [a-z]+)+[^"'`]*)\1""")
    folder = Path(settings.ASSETS_DIR) / "static"
    found = {}
    for path in (*folder.glob("js/*.js"), *folder.glob("*.js")):
        code = re.sub(r"/\*.*?\*/|(?<!:)//[^\n]*", "", path.read_text(), flags=re.DOTALL)
        if words := [match[2] for match in sentence.finditer(code)]:
            found[path.name] = words
    assert found == {}
