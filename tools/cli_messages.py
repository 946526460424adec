"""Write the catalogue of the command line's texts: `python -m tools.cli_messages`, a part of `make messages`.

Texts that are new have an empty translation, which a test refuses: translate them in the `.po` file and run this again.
Read are the marks in the code, the docstrings of commands, which are their help, and the examples.
"""

from __future__ import annotations

from collections.abc import Iterator
from inspect import getdoc
from pathlib import Path

from babel.messages.catalog import Catalog
from babel.messages.extract import extract_from_dir
from babel.messages.pofile import read_po

from dstackweb.cli import language, main, manual
from dstackweb.cli.options import COMMANDS
from tools.catalogues import empty, mo_bytes, po_bytes

ROOT = Path(__file__).parents[1]
FOLDER = language.LOCALE / language.CHINESE / "LC_MESSAGES"
PO, MO = (FOLDER / f"{language.DOMAIN}.{end}" for end in ("po", "mo"))
MARKS = {"_": None, "N_": None, "_n": (1, 2), "_p": ((1, "c"), 2), "Column": None}
Text = tuple[str | tuple[str, str], str | None, str]
"""One, or its singular and plural; its context; where it stands."""


def extracted() -> Catalog:
    """All texts that the code has now, without translations."""
    found = empty("The command line's texts")
    texts = {*_declared(), *_marked(Path(main.__file__).parent)}
    for text, context, file in sorted(texts, key=str):
        found.add(text, context=context, locations=[(file, 0)])
    return found


def _marked(folder: Path) -> Iterator[Text]:
    for name, _line, text, _comments, context in extract_from_dir(folder, keywords=MARKS):
        if text:
            yield text, context, f"{folder.name}/{name}"


def _declared() -> Iterator[Text]:
    """What `dstackweb COMMAND --help` shows besides its options."""
    for name, command in COMMANDS.items():
        if text := getdoc(command):
            yield text, None, f"dstackweb {name}"
    for name, examples in manual.EXAMPLES.items():
        for _line, about in examples:
            yield about, None, f"dstackweb {name}"


def merged(known: Catalog) -> Catalog:
    """What the code has now, with the translations that are known; nothing is guessed, and what is gone is left out."""
    found = extracted()
    for message in found:
        if message.id and (old := known.get(message.id, message.context)) and old.id == message.id:
            message.string = old.string
    return found


def known() -> Catalog:
    with PO.open("rb") as file:
        return read_po(file, locale=language.CHINESE, domain=language.DOMAIN)


def write() -> None:
    catalogue = merged(known() if PO.exists() else Catalog(locale=language.CHINESE))
    PO.write_bytes(po_bytes(catalogue))
    MO.write_bytes(mo_bytes(catalogue))
    missing = sum(not message.string or message.string == ("",) for message in catalogue if message.id)
    print(f"{PO.relative_to(ROOT)}: {len(catalogue)} texts, {missing} without a translation")


if __name__ == "__main__":
    write()
