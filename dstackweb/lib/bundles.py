"""One stylesheet and one script for all pages, made of their sources when static files are collected. Pure.

While developing, browsers load the sources themselves: `site.css` imports stylesheets, `app.js` modules. Both work
alike, since a module runs once, when it is first imported, and a rule is left out only if no page can match it.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from rjsmin import jsmin  # type: ignore[import-untyped]

Read = Callable[[str], str]
"""The text of a source by its path below the static files."""

_IMPORT_CSS = re.compile(r'@import "([^"]+)";\n?')
_WORD = re.compile(r"[A-Za-z0-9_-]+")
_CLASS = re.compile(r"\.((?:\\.|[\w-])+)")
_NOT = re.compile(r":not\([^()]*(?:\([^()]*\)[^()]*)*\)")
_COMMENT = re.compile(r"/\*(?!!).*?\*/", re.DOTALL)
_VARIABLE = re.compile(r"(--[\w-]+)\s*:")
_USED_VARIABLE = re.compile(r"var\(\s*(--[\w-]+)")

_IMPORT_JS = re.compile(r'^import (?:\{([^}]*)\} from )?"(\.[^"]+)";$', re.MULTILINE)
_LATER_JS = re.compile(r'\bimport\("(\.[^"]+)"\)')
_EXPORT_JS = re.compile(r"^export (?=(?:async )?(?:function|const|class) (\w+))", re.MULTILINE)
_NESTED = ("@media", "@supports", "@container", "@layer")
_START = """const modules = {};
const done = {};
const use = (name) => (done[name] ??= modules[name]());
const useLater = async (name) => use(name);
"""


class Rule(NamedTuple):
    """A rule of a stylesheet: its selectors or at-rule, and what is between its braces. `body` None: a statement."""

    head: str
    body: str | None


def words(texts: Iterable[str]) -> set[str]:
    """All words of these texts that may be a class: what pages and scripts name has to stay."""
    return {word for text in texts for word in _WORD.findall(text)}


def stylesheet(entry: str, read: Read, used: set[str]) -> str:
    """The stylesheet with its imports in it, without what pages can't use: rules for classes that are not in `used`,
    animations and Tabler's variables that nothing mentions."""
    rules = list(_rules(_COMMENT.sub("", _with_imports(entry, read))))
    text = "".join(_kept(rules, used))
    while True:
        mentioned = set(_USED_VARIABLE.findall(text)) | used
        shorter = "".join(_without(list(_rules(text)), mentioned, text))
        if shorter == text:
            return text
        text = shorter


def script(entry: str, read: Read) -> str:
    """The module with all that it imports, as one module. Each part runs once, when it is first imported."""
    parts: dict[str, str] = {}
    _add_module(entry, read, parts)
    text = _START + "".join(parts.values()) + f'use("{entry}");\n'
    return str(jsmin(text))


def _with_imports(path: str, read: Read) -> str:
    folder = posixpath.dirname(path)
    return _IMPORT_CSS.sub(lambda found: _with_imports(posixpath.join(folder, found[1]), read) + "\n", read(path))


def _rules(text: str) -> Iterator[Rule]:
    """The rules of a stylesheet without comments, in their order."""
    at = 0
    while at < len(text):
        begin = at
        while at < len(text) and text[at] not in "{;":
            at = _past(text, at)
        head = text[begin:at].strip()
        if at == len(text) or text[at] == ";":
            at += 1
            if head:
                yield Rule(head, None)
            continue
        at += 1
        begin, depth = at, 1
        while depth:
            if text[at] in "{}":
                depth += 1 if text[at] == "{" else -1
                at += 1
            else:
                at = _past(text, at)
        yield Rule(head, text[begin : at - 1].strip())


def _past(text: str, at: int) -> int:
    """The place behind the character here; behind the whole of a string, a url() or a comment."""
    if text[at] in "\"'":
        end = at + 1
        while text[end] != text[at]:
            end += 2 if text[end] == "\\" else 1
        return end + 1
    if text.startswith("/*", at):
        return text.index("*/", at) + 2
    if text.startswith("url(", at) and text[at + 4] not in "\"'":
        return text.index(")", at) + 1
    return at + (2 if text[at] == "\\" else 1)


def _kept(rules: list[Rule], used: set[str]) -> Iterator[str]:
    for head, body in rules:
        if body is None:
            yield f"{head};"
        elif head.startswith(_NESTED):
            if inner := "".join(_kept(list(_rules(body)), used)):
                yield f"{head}{{{inner}}}"
        elif _behind_comments(head).startswith("@"):
            yield f"{head}{{{body}}}"
        elif body and (selectors := [one for one in _selectors(head) if _matches(one, used)]):
            yield f"{','.join(selectors)}{{{body}}}"


def _behind_comments(head: str) -> str:
    return re.sub(r"/\*.*?\*/", "", head, flags=re.DOTALL).strip()


def _selectors(head: str) -> list[str]:
    """The parts of a list of selectors: commas inside brackets do not separate."""
    found, depth, begin = [], 0, 0
    for at, character in enumerate(head):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(character, 0)
        if character == "," and not depth:
            found.append(head[begin:at].strip())
            begin = at + 1
    return [*found, head[begin:].strip()]


def _matches(selector: str, used: set[str]) -> bool:
    """Whether a page could have what this selects: all of its classes are used, those in `:is()` or `:where()` in
    one of its alternatives."""
    plain = _NOT.sub("", _behind_comments(selector))
    alternatives = re.findall(r":(?:is|where)\(([^()]*)\)", plain)
    outside = re.sub(r":(?:is|where)\([^()]*\)", "", plain)
    return all(any(_has_classes(one, used) for one in some.split(",")) for some in alternatives) and _has_classes(
        outside, used
    )


def _has_classes(selector: str, used: set[str]) -> bool:
    names = (re.sub(r"\\(.)", r"\1", name) for name in _CLASS.findall(re.sub(r"\[[^\]]*\]", "", selector)))
    return all(set(_WORD.findall(name)) <= used for name in names)


def _without(rules: list[Rule], mentioned: set[str], text: str) -> Iterator[str]:
    for head, body in rules:
        if body is None:
            yield f"{head};"
        elif head.startswith("@keyframes"):
            name = head.split()[1]
            if re.search(rf"animation[\w-]*:[^;}}]*\b{re.escape(name)}\b", text):
                yield f"{head}{{{body}}}"
        elif head.startswith("@property"):
            if head.split()[1] in mentioned:
                yield f"{head}{{{body}}}"
        elif head.startswith(_NESTED):
            if inner := "".join(_without(list(_rules(body)), mentioned, text)):
                yield f"{head}{{{inner}}}"
        elif kept := ";".join(rule for rule in _declarations(body) if _is_used(rule, mentioned)):
            yield f"{head}{{{kept}}}"


def _declarations(body: str) -> list[str]:
    return [re.sub(r"^([\w-]+)\s*:\s*", r"\1:", rule.head) for rule in _rules(f"{body};")]


def _is_used(declaration: str, mentioned: set[str]) -> bool:
    variable = _VARIABLE.match(declaration)
    return variable is None or not variable[1].startswith("--tblr-") or variable[1] in mentioned


def _add_module(path: str, read: Read, parts: dict[str, str]) -> None:
    """The module as a function of its own, behind those it imports. It answers with what it exports."""
    if path in parts:
        return
    parts[path] = ""  # two modules may import one another
    source, folder = read(path), posixpath.dirname(path)

    def absolute(relative: str) -> str:
        other = posixpath.normpath(posixpath.join(folder, relative))
        _add_module(other, read, parts)
        return other

    def imported(found: re.Match[str]) -> str:
        names = f"const {{{found[1].replace(' as ', ': ')}}} = " if found[1] else ""
        return f'{names}use("{absolute(found[2])}");'

    exported = _EXPORT_JS.findall(source)
    source = _IMPORT_JS.sub(imported, source)
    source = _LATER_JS.sub(lambda found: f'useLater("{absolute(found[1])}")', source)
    source = _EXPORT_JS.sub("", source)
    if unknown := re.search(r"^(?:import|export)\b.*", source, re.MULTILINE):
        raise ValueError(f"{path}: this form of import or export is not supported: {unknown[0]}")
    del parts[path]
    parts[path] = f'modules["{path}"] = () => {{\n{source}\nreturn {{{", ".join(exported)}}};\n}};\n'
