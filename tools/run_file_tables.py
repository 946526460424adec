"""The tables of docs/run-file.md, made from the models: `python -m tools.run_file_tables` writes them there."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic_core import PydanticUndefined

from dstackweb.spec.effective import EffectiveSpec
from dstackweb.spec.fields import Keys
from dstackweb.spec.run_fields import ProfileFields, RunFields
from dstackweb.spec.wording import REFUSED_KEYS, REFUSED_TYPES, expected, keys_at

DOC = Path(__file__).resolve().parents[1] / "docs" / "run-file.md"
_BLOCK = re.compile(r"(<!-- made from the models: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str) -> str:
    own = [key for key in RunFields.model_fields if key not in ProfileFields.model_fields]
    tables = {
        "own": _table(RunFields, own),
        "profile": _table(ProfileFields, ProfileFields.model_fields),
        "refused": _refused(),
    }
    made = {name: "\n".join(lines) for name, lines in tables.items()}
    return _BLOCK.sub(lambda found: f"{found[1]}{made[found[2]]}\n{found[3]}", text)


def _table(model: type[Keys], keys: Iterable[str]) -> Iterator[str]:
    yield "| Key | Value | Default | Description |"
    yield "| --- | --- | --- | --- |"
    for key in keys:
        yield from _rows(model, (key,))


def _rows(model: type[Keys], path: tuple[str, ...]) -> Iterator[str]:
    """The row of a key, and the rows of the keys inside it."""
    parent = keys_at(model, path[:-1]) or model
    found = parent.model_fields[path[-1]]
    default = _default(path, found.default)
    yield f"| `{'.'.join(path)}` | {expected(found)} | {default} | {found.description} |"
    inner = keys_at(model, path)
    for key in inner.model_fields if inner else ():
        yield from _rows(model, (*path, key))


def _default(path: tuple[str, ...], default: Any) -> str:
    """The default in the file's notation."""
    if default is PydanticUndefined:
        return "required"
    if len(path) == 1 or path[0] == "resources":
        value: Any = EffectiveSpec(commands=("true",)).as_file()
        for part in path:
            value = value.get(part) if isinstance(value, dict) else None
        default = default if value is None or isinstance(value, dict) else value
    if default is None or default == "":
        return "–"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, tuple | list):
        return f"`[{', '.join(default)}]`"
    return f"`{default}`"


def _refused() -> Iterator[str]:
    yield "| Not supported | Use instead |"
    yield "| --- | --- |"
    for name, hint in REFUSED_TYPES.items():
        yield f"| `type: {name}` | {hint} |"
    for name, hint in REFUSED_KEYS.items():
        yield f"| `{name}` | {hint} |"


if __name__ == "__main__":
    DOC.write_text(filled(DOC.read_text()))
