"""SSH keys: people's public keys, and the key by which people know the gateway."""

from __future__ import annotations

import base64
import hashlib
import struct
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_public_key,
)
from django.utils.translation import gettext as _

from dstackweb.lib.process import write_once

PLAIN = ("ssh-ed25519", "ssh-rsa", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521")
ON_TOKENS = ("sk-ssh-ed25519@openssh.com", "sk-ecdsa-sha2-nistp256@openssh.com")
RSA_LEAST = 2048
TEXT_MOST = 10_000
HOST_KEY = "ssh_host_key"


def read_public_key(text: str) -> tuple[str, str]:
    """The key in one line without comment, and its fingerprint. Raises ValueError with the reason."""
    words = text.split()
    if len(text) > TEXT_MOST or "PRIVATE KEY" in text:
        raise ValueError(_("this is not a public key: give the line of a file such as ~/.ssh/id_ed25519.pub"))
    if len(words) < 2 or words[0] not in (*PLAIN, *ON_TOKENS):
        raise ValueError(_("this is not a public key such as `ssh-ed25519 AAAA…`, in one line"))
    line = " ".join(words[:2])
    try:
        blob = base64.b64decode(words[1], validate=True)
        (size,) = struct.unpack_from("!I", blob)
        if blob[4 : 4 + size].decode("ascii") != words[0]:
            raise ValueError
        key = load_ssh_public_key(line.encode()) if words[0] in PLAIN else None
    except (ValueError, struct.error, UnsupportedAlgorithm):
        raise ValueError(_("this public key is damaged: copy its whole line")) from None
    if isinstance(key, RSAPublicKey) and key.key_size < RSA_LEAST:
        raise ValueError(_("an RSA key needs %(bits)s bits at least") % {"bits": RSA_LEAST})
    return line, fingerprint(blob)


def fingerprint(blob: bytes) -> str:
    """As `ssh-keygen -l` shows it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def host_key(home: Path) -> Path:
    """The file of the gateway's private key, which is made once, for its user alone. Raises OSError."""
    path = home / HOST_KEY
    if not path.exists():
        key = Ed25519PrivateKey.generate()
        public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        path.with_suffix(".pub").write_bytes(public + b"\n")
        write_once(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    return path


def host_fingerprint(home: Path) -> str:
    """The fingerprint of the gateway's key; empty before it has one."""
    try:
        words = (home / HOST_KEY).with_suffix(".pub").read_text().split()
        return fingerprint(base64.b64decode(words[1]))
    except (OSError, ValueError, IndexError):
        return ""
