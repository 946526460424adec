"""One stylesheet and one script for all pages, made of their sources when static files are collected. Pure.

While developing, browsers load the sources themselves: `site.css` imports stylesheets, `app.js` modules. Both work
alike, since a module runs once, when it is first imported, and a rule is left out only if no page can match it.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import tinycss2  # type: ignore[import-untyped]  # it has no types
from rjsmin import jsmin  # type: ignore[import-untyped]  # it has no types

Read = Callable[[str], str]
"""The text of a source by its path below the static files."""

_IMPORT_CSS = re.compile(r'@import "([^"]+)";\n?')
_WORD = re.compile(r"[A-Za-z0-9_-]+")
_BANNER = re.compile(r"/\*!.*?\*/", re.DOTALL)
_USED_VARIABLE = re.compile(r"var\(\s*(--[\w-]+)")
_WITH_RULES = ("media", "supports", "container", "layer", "keyframes")

_IMPORT_JS = re.compile(r'^import (?:\{([^}]*)\} from )?"(\.[^"]+)";$', re.MULTILINE)
_LATER_JS = re.compile(r'\bimport\("(\.[^"]+)"\)')
_EXPORT_JS = re.compile(r"^export (?=(?:async )?(?:function|const|class) (\w+))", re.MULTILINE)
_RESTYLE_ALL = ("legend+*", ".steps:not(", "html:not([data-bs-navbar-position=vertical])")
"""How selectors of Tabler begin that no page needs, and that have browsers style the whole page after an insertion."""
_START = """const modules = {};
const done = {};
const use = (name) => (done[name] ??= modules[name]());
const useLater = async (name) => use(name);
"""


class Rule(NamedTuple):
    """A rule of a stylesheet: its selectors or at-rule, and what is between its braces: (name, value), or rules."""

    head: str
    declarations: list[tuple[str, str]]
    rules: list[Rule]


def words(texts: Iterable[str]) -> set[str]:
    """All words of these texts that may be a class, or the beginning of one, such as `st-` of `st-{{ run.status }}`."""
    return {word for text in texts for word in _WORD.findall(text)}


def stylesheet(entry: str, read: Read, used: set[str]) -> str:
    """The stylesheet with its imports in it, without what pages can't use: rules for classes that are not in `used`,
    animations and Tabler's variables that nothing mentions."""
    source = _with_imports(entry, read)
    rules = _kept(tinycss2.parse_component_value_list(source, skip_comments=True), used)
    while (fewer := _without_unused(rules, used)) != rules:
        rules = fewer
    return "".join(_BANNER.findall(source)) + _as_text(rules)


def script(entry: str, read: Read) -> str:
    """The module with all that it imports, as one module. Each part runs once, when it is first imported."""
    parts: dict[str, str] = {}
    _add_module(entry, read, parts)
    text = _START + "".join(parts.values()) + f'use("{entry}");\n'
    return str(jsmin(text))


def _with_imports(path: str, read: Read) -> str:
    folder = posixpath.dirname(path)
    return _IMPORT_CSS.sub(lambda found: _with_imports(posixpath.join(folder, found[1]), read) + "\n", read(path))


def _kept(tokens: Sequence[Any], used: set[str]) -> list[Rule]:
    """The rules that a page can match. Raises ValueError for what is no stylesheet."""
    found = []
    for node in tinycss2.parse_rule_list(tokens, skip_whitespace=True):
        if node.type == "error":
            raise ValueError(f"line {node.source_line}: {node.message}")
        if node.content is None and node.lower_at_keyword != "charset":
            raise ValueError(f"@{node.at_keyword}: this form of at-rule is not supported")
        content = node.content or []
        if node.type == "at-rule":
            head = f"@{node.at_keyword}{tinycss2.serialize(node.prelude)}".strip()
            has_rules = node.lower_at_keyword.endswith(_WITH_RULES)
        else:
            selectors = (tinycss2.serialize(one).strip() for one in _parts(node.prelude) if _matches(one, used))
            head = ",".join(one for one in selectors if not one.startswith(_RESTYLE_ALL))
            has_rules = False
        rules = _kept(content, used) if has_rules else []
        declarations = [] if has_rules else _declarations(content)
        if head and (rules or declarations):
            found.append(Rule(head, declarations, rules))
    return found


def _declarations(tokens: Sequence[Any]) -> list[tuple[str, str]]:
    found = tinycss2.parse_declaration_list(tokens, skip_comments=True, skip_whitespace=True)
    if wrong := [node for node in found if node.type != "declaration"]:
        raise ValueError(f"line {wrong[0].source_line}: this is no declaration")
    return [
        (node.name, tinycss2.serialize(node.value).strip() + ("!important" if node.important else "")) for node in found
    ]


def _parts(tokens: Sequence[Any]) -> list[list[Any]]:
    """Those that commas separate."""
    parts: list[list[Any]] = [[]]
    for node in tokens:
        if node == ",":
            parts.append([])
        else:
            parts[-1].append(node)
    return parts


def _matches(selector: Sequence[Any], used: set[str]) -> bool:
    """Whether a page could have what this selects: all of its classes and data attributes are used, those in
    `:is()` or `:has()` in one of its alternatives; what is in `:not()` does not matter."""
    for before, token in pairwise([None, *selector]):
        is_class = token.type == "ident" and before == "."
        if is_class and not all(_is_used(word, used) for word in _WORD.findall(token.value)):
            return False
        if token.type == "[] block" and any(_is_never_set(one, used) for one in token.content):
            return False
        has_alternatives = token.type == "function" and token.lower_name != "not"
        if has_alternatives and not any(_matches(one, used) for one in _parts(token.arguments)):
            return False
    return True


def _is_never_set(token: Any, used: set[str]) -> bool:
    """Whether this is the name of a data attribute that nothing sets, neither as `data-bs-theme` nor as `bsTheme`."""
    if token.type != "ident" or not token.value.startswith("data-"):
        return False
    first, *more = token.value.removeprefix("data-").split("-")
    return used.isdisjoint({token.value, first + "".join(map(str.title, more))})


def _is_used(name: str, used: set[str]) -> bool:
    """Whether the name, or a beginning of it up to a hyphen, is used."""
    return name in used or any(name[: hyphen.end()] in used for hyphen in re.finditer("-", name))


def _without_unused(rules: Sequence[Rule], used: set[str]) -> list[Rule]:
    """Without animations that nothing names and Tabler's variables that nothing reads."""
    values = list(_all_declarations(rules))
    animated = " ".join(value for name, value in values if name.startswith("animation"))
    return _needed(
        rules, used.union(*(_USED_VARIABLE.findall(value) for _, value in values)), set(_WORD.findall(animated))
    )


def _all_declarations(rules: Sequence[Rule]) -> Iterator[tuple[str, str]]:
    for rule in rules:
        yield from rule.declarations
        yield from _all_declarations(rule.rules)


def _needed(rules: Sequence[Rule], variables: set[str], animations: set[str]) -> list[Rule]:
    found = []
    for rule in rules:
        kind, _, name = rule.head.partition(" ")
        if (kind == "@property" and name not in variables) or (kind == "@keyframes" and name not in animations):
            continue
        kept = [one for one in rule.declarations if not one[0].startswith("--tblr-") or one[0] in variables]
        if kept or (inside := _needed(rule.rules, variables, animations)):
            found.append(Rule(rule.head, kept, [] if kept else inside))
    return found


def _as_text(rules: Sequence[Rule]) -> str:
    each = (
        (rule.head, ";".join(f"{name}:{value}" for name, value in rule.declarations) or _as_text(rule.rules))
        for rule in rules
    )
    return "".join(f"{head}{{{inside}}}" for head, inside in each)


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
