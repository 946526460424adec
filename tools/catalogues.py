"""What the catalogues of translations have in common: the same texts give the same files."""

from __future__ import annotations

import io
from datetime import UTC, datetime

from babel.messages.catalog import Catalog
from babel.messages.mofile import write_mo
from babel.messages.pofile import write_po

LANGUAGE = "zh_Hans"
_EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
"""In place of the time of writing."""


def empty(texts: str) -> Catalog:
    """One without texts; `texts` says which belong there."""
    return Catalog(
        locale=LANGUAGE,
        project="dstackweb",
        header_comment=f"# {texts} in Simplified Chinese. `make messages` writes this file.",
        creation_date=_EPOCH,
        revision_date=_EPOCH,
        last_translator="dstackweb",
        language_team="dstackweb",
        msgid_bugs_address="-",
        fuzzy=False,
    )


def po_bytes(catalogue: Catalog) -> bytes:
    file = io.BytesIO()
    write_po(file, catalogue, width=120, sort_output=True, include_lineno=False, ignore_obsolete=True)
    return file.getvalue()


def mo_bytes(catalogue: Catalog) -> bytes:
    file = io.BytesIO()
    write_mo(file, catalogue)
    return file.getvalue()
