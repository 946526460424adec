"""Masking secrets in a stream, byte for byte, so that offsets stay the same. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def mask(data: bytes, secrets: Sequence[bytes]) -> bytes:
    """`data` with every occurrence of every secret, overlapping ones too, as asterisks of the same length."""
    out = bytearray(data)
    for secret in filter(None, secrets):
        at = data.find(secret)
        while at >= 0:
            out[at : at + len(secret)] = b"*" * len(secret)
            at = data.find(secret, at + 1)
    return bytes(out)


def settled(data: bytes, secrets: Sequence[bytes]) -> int:
    """How much of `data` can't be the beginning of a secret that goes on behind it."""
    longest = max(map(len, secrets), default=0)
    firsts = {secret[:1] for secret in secrets}
    for start in range(max(0, len(data) - longest + 1), len(data)):
        if data[start : start + 1] in firsts:
            tail = data[start:]
            if any(len(secret) > len(tail) and secret.startswith(tail) for secret in secrets):
                return start
    return len(data)
