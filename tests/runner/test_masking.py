"""No secret leaves in any form that programs print, whole or in parts, and all other text leaves as it is."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from unittest import mock
from urllib.parse import quote, quote_plus, unquote_to_bytes

import pytest
from hypothesis import given, strategies as st

from dstackweb.runner import output, spool
from dstackweb.runner.masking import HEAD, PART_MIN, Masker, patterns
from tests.support import examples

PIECES = st.sampled_from([b"a", b"b", b"ab", b"aba", b"abab", b"bb", b"\0", b"\xff", b"\n", b"a" * HEAD])
TEXTS = st.lists(PIECES, max_size=30).map(b"".join)
SECRETS = st.lists(st.lists(PIECES, min_size=1, max_size=3).map(b"".join), max_size=3)


def mask_slowly(data: bytes, found: list[bytes]) -> bytes:
    """Whether a byte is masked, asked of each byte and each place where a pattern may begin."""
    covered = {
        at
        for pattern in found
        for start in range(len(data))
        if pattern and data.startswith(pattern, start)
        for at in range(start, start + len(pattern))
    }
    return bytes(ord("*") if at in covered and byte not in b"\r\n" else byte for at, byte in enumerate(data))


@examples(500)
@given(TEXTS, SECRETS)
def test_masking_covers_every_occurrence_and_keeps_length_and_lines(data: bytes, found: list[bytes]) -> None:
    assert Masker(found).mask(data) == mask_slowly(data, found)


@examples(500)
@given(TEXTS, TEXTS, SECRETS)
def test_what_is_settled_is_masked_alike_whatever_follows(data: bytes, more: bytes, found: list[bytes]) -> None:
    end = Masker(found).settled(data)
    assert mask_slowly(data + more, found)[:end] == mask_slowly(data, found)[:end]


@examples(500)
@given(TEXTS, SECRETS.filter(bool), st.integers(1, 5))
def test_nothing_is_held_back_without_need(data: bytes, found: list[bytes], least: int) -> None:
    held = data[Masker(found).settled(data, least) :]
    assert not held or any(len(each) > len(held) >= least and each.startswith(held) for each in found)


VALUE = "pa/ss+wörd\"&'\\ \nsecond~line=42\n"


@pytest.mark.parametrize(
    "text",
    [
        VALUE,
        "second~line=42",
        *(base64.b64encode(before + VALUE.encode()).decode() for before in (b"", b"x", b"xy")),
        base64.urlsafe_b64encode(VALUE.encode()).decode(),
        quote(VALUE),
        quote(VALUE, safe="").lower(),
        quote_plus(VALUE),
        quote(VALUE, safe="!~*'()"),
        json.dumps(VALUE)[1:-1],
        json.dumps(VALUE, ensure_ascii=False)[1:-1],
        json.dumps(VALUE)[1:-1].replace("/", "\\/"),
        json.dumps(VALUE.splitlines()[0])[1:-1],
        repr(VALUE)[1:-1],
        repr(VALUE.encode())[2:-1],
    ],
)  # fmt: skip
def test_each_form_of_a_secret_is_masked(text: str) -> None:
    """But for characters of base64 that have bits of what is around it."""
    data = text.encode()
    shown = Masker.of([VALUE]).mask(data)
    assert len(shown.replace(b"*", b"").replace(b"\n", b"")) <= 6 < len(data)


def test_wrapped_base64_is_masked_in_each_line() -> None:
    value = "".join(f"{number:x}" for number in range(300))
    for wrapped in (base64.encodebytes(value.encode()), base64.encodebytes(value.encode() + b"\n")):
        assert set(Masker.of([value]).mask(wrapped)[:-6]) == set(b"*\n")


def test_short_parts_of_a_secret_are_ordinary_text() -> None:
    assert Masker.of(["begin\nyes\nthe-second-line\n"]).mask(b"yes, begin") == b"yes, begin"
    assert min(map(len, patterns("begin\nyes\nthe-second-line\n"))) >= PART_MIN


SECRET_TEXTS = st.text(st.sampled_from("abcXYZ019/+=~ \"'\\%&<é€\n\t"), min_size=8, max_size=40).filter(
    lambda text: len(text.strip()) >= 8
)
FORMS = st.sampled_from([
    lambda text: text.encode(),
    lambda text: base64.b64encode(text.encode()),
    lambda text: base64.b64encode(b"user:" + text.encode()),
    lambda text: base64.urlsafe_b64encode(b"id=" + text.encode() + b"&"),
    lambda text: base64.b64encode(b"xx" + text.encode() + b"y"),
    lambda text: quote(text).encode(),
    lambda text: quote_plus(text).encode(),
    lambda text: json.dumps({"key": text}).encode(),
    lambda text: json.dumps([text], ensure_ascii=False).encode(),
    lambda text: repr({"key": text}).encode(),
])  # fmt: skip
NOISE = st.sampled_from([b"", b" ", b"\n", b"step 12 loss 0.31\n", b"a", b"YWJj", b"%2F", b"\xff\0", b"=="])


def pieces_sent(path: Path, masker: Masker, writes: list[bytes], chunk: int) -> bytes:
    """A log that is written and sent piece by piece."""
    path.write_bytes(b"")
    sent = b""
    for number, data in enumerate(writes):
        with path.open("ab") as file:
            file.write(data)
        is_last = number == len(writes) - 1
        while piece := spool.read_masked(str(path), len(sent), masker, chunk, final=is_last):
            sent += piece
    return sent


def readings(text: bytes) -> Iterator[bytes]:
    """A text, and what a reader makes of it who tries each notation at each place."""
    yield text
    yield unquote_to_bytes(text)
    yield unquote_to_bytes(text.replace(b"+", b" "))
    yield text.decode("unicode_escape", "ignore").encode("utf-8", "ignore")
    yield text.decode("unicode_escape", "ignore").encode("latin-1", "ignore")
    for run in re.findall(rb"[\w+/-]{8,}", text):
        for start in range(4):
            whole = run[start:].translate(bytes.maketrans(b"-_", b"+/"))
            yield base64.b64decode(whole[: len(whole) // 4 * 4])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("masking") / "spool"


@examples(2000)
@given(
    parts=st.lists(st.tuples(NOISE, st.integers(0, 3), FORMS), min_size=1, max_size=6),
    secrets=st.lists(SECRET_TEXTS, min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 400), max_size=5),
    chunk=st.sampled_from([1, 7, 64, 1 << 18]),
)
def test_no_form_of_a_secret_is_sent_however_the_output_is_cut(
    path: Path,
    parts: list[tuple[bytes, int, FORMS]],
    secrets: list[str],
    cuts: list[int],
    chunk: int,  # type: ignore[valid-type]
) -> None:
    text = b"".join(noise + (form(secrets[number]) if number < len(secrets) else b"") for noise, number, form in parts)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    writes = [text[start:end] for start, end in zip(places, [*places[1:], len(text)], strict=True)]
    masker = Masker.of(secrets)
    sent = pieces_sent(path, masker, writes, chunk)
    every = [pattern for secret in secrets for pattern in patterns(secret)]
    assert sent == mask_slowly(text, every)
    assert not [secret for secret in secrets for found in readings(sent) if secret.encode() in found]


@examples(300)
@given(data=st.binary(max_size=300), secrets=st.lists(SECRET_TEXTS, max_size=3))
def test_text_without_secrets_is_sent_unchanged(path: Path, data: bytes, secrets: list[str]) -> None:
    if not any(pattern in data for secret in secrets for pattern in patterns(secret)):
        assert pieces_sent(path, Masker.of(secrets), [data[:100], data[100:]], 1 << 18) == data


class Clock:
    now = 0.0


class Api:
    """Takes whatever is sent."""

    sent = b""

    def post_bytes(self, path: str, data: bytes) -> dict[str, int]:
        self.sent += data
        return {"next": len(self.sent)}


def test_output_that_begins_like_a_secret_waits_only_for_a_moment(path: Path) -> None:
    api = Api()
    with mock.patch.object(output.time, "monotonic", side_effect=lambda: Clock.now):
        sender = output.Shipper(api, str(path), Masker([b"hunter2-hunter2"]))  # type: ignore[arg-type]
        path.write_bytes(b"Continue? hun")
        assert sender.ship()
        assert not sender.ship()
        assert api.sent == b"Continue? "
        Clock.now += output.QUIET_S + 1
        assert sender.ship()
        assert api.sent == b"Continue? hun"
        path.write_bytes(b"Continue? hunter2-hun")
        Clock.now += output.QUIET_S + 1
        assert not sender.ship()
        path.write_bytes(b"Continue? hunter2-hunter2\n")
        assert sender.ship()
        assert api.sent == b"Continue? hun************\n"
