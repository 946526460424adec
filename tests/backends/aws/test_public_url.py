"""Whether a cloud's instances could reach this server."""

from __future__ import annotations

import pytest

from dstackweb.backends.aws.public_url import find_problem


@pytest.mark.parametrize(
    ("url", "found", "where_private_is_allowed"),
    [
        ("", "missing", "missing"),
        ("https://gpus.example.org", None, None),
        ("https://8.8.8.8:8443", None, None),
        ("http://gpus.example.org", "not_https", "not_https"),
        ("http://127.0.0.1:8000", "not_https", None),
        ("https://localhost", "private", None),
        ("https://[::1]", "private", None),
        ("https://10.1.2.3", "private", None),
        ("https://169.254.169.254", "private", None),
        ("https://gpubox", "private", None),
        ("https://gpus.internal.", "private", None),
        ("http://10.1.2.3", "not_https", "not_https"),
    ],
)
def test_only_an_encrypted_public_url_will_do(
    url: str, found: str | None, where_private_is_allowed: str | None
) -> None:
    assert find_problem(url, allow_private=False) == found
    assert find_problem(url, allow_private=True) == where_private_is_allowed
