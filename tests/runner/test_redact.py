from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dstackweb.runner.redact import margin, mask, settled

SECRETS = st.lists(
    st.binary(min_size=0, max_size=5).map(lambda raw: bytes(b"ab-"[byte % 3] for byte in raw)), max_size=4
)
STREAM = st.lists(st.sampled_from(b"ab-"), max_size=60).map(bytes)


def by_brute_force(data: bytes, secrets: list[bytes]) -> bytes:
    """Each byte that lies in some occurrence of some secret, found by trying every place."""
    hidden = {
        place
        for secret in secrets
        for at in range(len(data))
        if secret and data[at : at + len(secret)] == secret
        for place in range(at, at + len(secret))
    }
    return bytes(ord("*") if place in hidden else byte for place, byte in enumerate(data))


@given(STREAM, SECRETS)
def test_every_occurrence_is_masked_overlapping_ones_too_and_nothing_else(data: bytes, secrets: list[bytes]) -> None:
    assert mask(data, secrets) == by_brute_force(data, secrets)


@given(STREAM, SECRETS, st.lists(st.integers(0, 60), max_size=6))
def test_pieces_masked_one_by_one_make_the_masked_stream(data: bytes, secrets: list[bytes], cuts: list[int]) -> None:
    """Wherever a stream grows, and wherever reading it begins again: its settled pieces join to the whole."""
    sent, around = 0, margin(secrets)
    shipped = b""
    for size in [*sorted(min(cut, len(data)) for cut in cuts), len(data)]:
        start = max(0, sent - around)
        window = data[start:size]
        stop = len(window) if size == len(data) else settled(window, secrets)
        piece = mask(window, secrets)[sent - start : max(stop, sent - start)]
        shipped += piece
        sent += len(piece)
    assert shipped == by_brute_force(data, secrets)


@given(STREAM, SECRETS)
def test_only_the_beginning_of_a_secret_is_kept_waiting(data: bytes, secrets: list[bytes]) -> None:
    waiting = data[settled(data, secrets) :]
    assert not waiting or any(secret.startswith(waiting) and secret != waiting for secret in secrets)
