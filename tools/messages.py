"""The texts of pages, mails and API, and their translations: `make messages` brings locale/ up to date.

What is marked in the code and the templates is found by GNU gettext (xgettext, msgmerge); names of models, fields and
settings are those that Django and the forms of backends make.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import django
from babel.messages.catalog import Catalog
from babel.messages.pofile import read_po
from django.apps import apps

from tools.catalogues import LANGUAGE, empty, mo_bytes, po_bytes

ROOT = Path(__file__).resolve().parents[1]
CATALOGUE = ROOT / "locale" / LANGUAGE / "LC_MESSAGES" / "django.po"


def extracted(folder: Path) -> Catalog:
    """The catalogue as the code is now, with the translations that there are; made in an empty folder."""
    shutil.copytree(ROOT / "templates", folder / "templates")
    shutil.copytree(ROOT / "dstackweb", folder / "dstackweb", ignore=_no_texts)
    (folder / "names.py").write_text("\n".join(f"_({text!r})" for text in sorted(_names())))
    target = folder / CATALOGUE.relative_to(ROOT)
    target.parent.mkdir(parents=True)
    if CATALOGUE.exists():
        shutil.copy(CATALOGUE, target)
    command = [sys.executable, "-m", "django", "makemessages", "--locale", LANGUAGE, "--no-location", "--no-obsolete"]
    environment = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode or done.stderr.strip():
        raise RuntimeError(f"{done.stdout}\n{done.stderr}")
    with target.open("rb") as file:
        merged = read_po(file, locale=LANGUAGE, ignore_obsolete=True)
    return _plain(merged)


def _plain(merged: Catalog) -> Catalog:
    """The same texts give the same file: without places in the code, and with a header that does not change."""
    found = empty("Texts of pages, mails and the API")
    for one in merged:
        if one.id:
            found.add(one.id, one.string, flags=one.flags & {"fuzzy"}, context=one.context)
    return found


def _no_texts(path: str, names: list[str]) -> list[str]:
    """The command line's texts have a catalogue of their own."""
    left_out = ("__pycache__", "migrations", *(["cli"] if Path(path) == ROOT / "dstackweb" else ()))
    return [name for name in names if name in left_out]


def _names() -> set[str]:
    """Names that are written nowhere as a text."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "dstackweb.settings")
    if not apps.ready:
        django.setup()
    from dstackweb.backends import registry
    from dstackweb.lib import admin
    from dstackweb.profiles import admin as profiles

    importlib.import_module("dstackweb.urls")  # which has the models named
    labels = {
        info.title or name.replace("_", " ").capitalize()
        for kind in registry.KINDS.values()
        for name, info in kind.schema.model_fields.items()
    }
    return admin.texts | admin.of_others() | labels | profiles.descriptions()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = extracted(Path(folder))
    CATALOGUE.parent.mkdir(parents=True, exist_ok=True)
    CATALOGUE.write_bytes(po_bytes(found))
    CATALOGUE.with_suffix(".mo").write_bytes(mo_bytes(found))
    open_ = [one for one in found if one.id and (one.fuzzy or not one.string)]
    print(f"{CATALOGUE.relative_to(ROOT)}: {len(found)} texts, {len(open_)} without a translation or doubtful (fuzzy)")


if __name__ == "__main__":
    main()
