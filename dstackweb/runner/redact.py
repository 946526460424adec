"""Masking secrets in a stream, byte for byte, so that offsets stay the same. Pure.

Whether a byte is masked depends only on the bytes around it, less than one secret's length away on either side. So a
piece can be masked by itself, wherever it was cut out, when it is seen with that much of what stands around it.
"""

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
    """How many bytes of `data` come before a possible beginning of a secret that goes on behind it."""
    least = len(data)
    for secret in filter(None, secrets):
        at = max(0, len(data) - len(secret) + 1)
        while (at := data.find(secret[:1], at, least)) >= 0:
            if secret.startswith(data[at:]):
                least = at
                break
            at += 1
    return least


def margin(secrets: Sequence[bytes]) -> int:
    """How many bytes on either side of a piece decide about the piece."""
    return max([len(secret) - 1 for secret in secrets if secret], default=0)
