"""Pages of the documentation's site that are made of other files: `make docs` calls this while it reads `docs/`.

README.md is its first page; contributing, changelog and examples stand elsewhere in the repository, and the references
of commands and of the API are made from the code.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from typer.testing import CliRunner

from dstackweb.cli.main import app
from dstackweb.cli.options import COMMANDS

ROOT = Path(__file__).parents[1]
MOVED = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
PICTURE = re.compile(r"!\[([^]]*)\]\(([^)\s]*images/[\w-]+)-light\.webp\)")
METHODS = ("get", "post", "put", "patch", "delete")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Have all decisions at the end of the contents."""
    assert config.nav is not None
    decisions = sorted(path.name for path in (ROOT / "docs" / "decisions").glob("*.md"))
    config.nav.append({"Decisions": [f"decisions/{name}" for name in decisions]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made here."""
    made = {new: _moved((ROOT / old).read_text()) for old, new in MOVED.items()}
    made["examples.md"] = "\n".join(_examples())
    made["reference/commands.md"] = "\n".join(_commands())
    made["reference/api.md"] = "\n".join(_api(_openapi()))
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    files.append(File.generated(config, "images/logo.svg", content=(ROOT / "static" / "favicon.svg").read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links out of `docs/` to the pages that stand for what they name; show each picture in the page's theme."""
    up = "../" * page.file.src_uri.count("/")
    for old, new in MOVED.items():
        markdown = markdown.replace(f"](../{up}{old}", f"]({up}{new}")
    markdown = PICTURE.sub(_pair, markdown)
    return re.sub(r"\]\(\.\./(examples)/([\w-]+)\.yaml\)", r"](examples.md#\2yaml)", markdown)


def _pair(found: re.Match[str]) -> str:
    """A picture and the same in the dark theme; those of a phone are as wide as one."""
    width = "{width=300}" if found[2].endswith("-phone") else ""
    return "".join(f"![{found[1]}]({found[2]}-{theme}.webp#only-{theme}){width}" for theme in ("light", "dark"))


def _moved(text: str) -> str:
    """A page of the repository's top folder as one of `docs/`."""
    text = re.sub(r"\]\(docs/decisions/\)", "](decisions/0001-the-database-is-the-truth.md)", text)
    for old, new in MOVED.items():
        text = text.replace(f"]({old}", f"]({new}")
    return text.replace("](docs/", "](")


def _examples() -> Iterator[str]:
    yield "# Examples\n\nRun files of the folder `examples/`. Submit one with `dstackweb apply -f`.\n"
    for path in sorted((ROOT / "examples").glob("*.yaml")):
        yield f"## {path.name}\n\n```yaml\n{path.read_text().rstrip()}\n```\n"


def _commands() -> Iterator[str]:
    yield "# Commands and their options\n"
    yield "What `dstackweb COMMAND --help` says. How to use them: [command line](../cli.md).\n"
    aliases = ("ls", "rm")
    for name in ["", *sorted(name for name in COMMANDS if name.split()[-1] not in aliases)]:
        words, width = [*name.split(), "--help"], {"COLUMNS": "100"}
        shown = CliRunner().invoke(app, words, prog_name="dstackweb", env=width)
        lines = [line.rstrip() for line in shown.stdout.strip().splitlines()]
        yield "\n".join([f"## dstackweb {name}".rstrip(), "", "```text", *lines, "```", ""])


def _openapi() -> dict[str, Any]:
    """The description of the API, as the server gives it."""
    os.environ["DJANGO_SETTINGS_MODULE"] = "dstackweb.settings"
    os.environ["DSTACKWEB_HOME"] = tempfile.mkdtemp()
    import django

    django.setup()
    from dstackweb.api.urls import api

    found: dict[str, Any] = json.loads(json.dumps(api.get_openapi_schema(), default=str))
    return found


def _api(openapi: dict[str, Any]) -> Iterator[str]:
    """Every operation by its subject, with what it takes; the bodies' fields behind them."""
    yield "# REST API\n"
    yield "A server describes itself at `/api/v1/openapi.json`. Calls carry `Authorization: Bearer TOKEN`.\n"
    subjects: dict[str, list[str]] = {}
    for path, methods in openapi["paths"].items():
        for method in (one for one in METHODS if one in methods):
            operation = methods[method]
            subjects.setdefault(operation["tags"][0], []).extend(_operation(method, path, operation))
    for subject, lines in sorted(subjects.items()):
        yield f"## {subject.capitalize()}\n"
        yield from lines
    yield "## Schemas\n"
    for name, schema in sorted(openapi["components"]["schemas"].items()):
        yield from _schema(name, schema)


def _operation(method: str, path: str, operation: dict[str, Any]) -> Iterator[str]:
    yield f"### {operation['summary']}\n\n`{method.upper()} {path}`\n"
    yield from _description(operation)
    yield from _table(
        ("parameter", "in", "type", "description"),
        [
            (f"`{one['name']}`", one["in"], _type(one["schema"]), one.get("description", ""))
            for one in operation.get("parameters", ())
        ],
    )
    for body in operation.get("requestBody", {}).get("content", {}).values():
        yield f"Body: {_type(body['schema'])}\n"
    for status, answer in operation["responses"].items():
        for kind in answer.get("content", {}).values():
            if str(status).startswith("2") and "schema" in kind:
                yield f"Answer {status}: {_type(kind['schema'])}\n"


def _schema(name: str, schema: dict[str, Any]) -> Iterator[str]:
    yield f"### {name}\n"
    yield from _description(schema)
    needed = schema.get("required", ())
    yield from _table(
        ("field", "type", "required", "description"),
        [
            (f"`{field}`", _type(one), "yes" if field in needed else "", one.get("description", ""))
            for field, one in schema.get("properties", {}).items()
        ],
    )
    if values := schema.get("enum"):
        yield ", ".join(f"`{value}`" for value in values) + "\n"


def _description(found: dict[str, Any]) -> Iterator[str]:
    if text := found.get("description"):
        yield f"{text}\n"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table without columns that are empty in all rows."""
    if not rows:
        return
    full = [column for column in range(len(heads)) if any(row[column] for row in rows)]
    yield _row([heads[column] for column in full])
    yield _row(["---"] * len(full))
    yield from (_row([row[column] for column in full]) for row in rows)
    yield ""


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '&#124;').replace(chr(10), ' ') for cell in cells)} |"


def _type(schema: dict[str, Any]) -> str:
    """A type in words, with links to schemas."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[-1]
        return f"[{name}](#{name.lower()})"
    if parts := schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf"):
        return " or ".join(_type(part) for part in parts)
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if schema.get("type") == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_type(schema['additionalProperties'])}"
    return str(schema.get("format") or schema.get("type") or "anything")
