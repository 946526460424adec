"""One stylesheet and one script are made of their sources, and pages work with them as with the sources."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from django.conf import settings

from dstackweb.lib import bundles
from dstackweb.lib.static_files import SCRIPT, STYLES, page_sources
from dstackweb.runs.states import RunStatus

STATIC = Path(settings.ASSETS_DIR) / "static"
TEMPLATES = Path(settings.ASSETS_DIR) / "templates"
CLASS = re.compile(r"\.(-?[_a-zA-Z][\w-]*)")
DJANGO = re.compile(r"\{[{%#].*?[}%#]\}")


def _source(path: str) -> str:
    return (STATIC / path).read_text()


@pytest.fixture(scope="module")
def stylesheet() -> str:
    return bundles.stylesheet(STYLES, _source, bundles.words(path.read_text() for path in page_sources()))


def _made(css: str, used: str) -> str:
    return bundles.stylesheet("a.css", {"a.css": css}.__getitem__, bundles.words([used]))


@pytest.mark.parametrize(
    ("css", "used", "made"),
    [
        (".card{color:red}.dropdown{color:red}", "card", ".card{color:red}"),
        (".a,.b{color:red}", "b", ".b{color:red}"),
        (".a .b{color:red}.a:not(.c){color:red}", "a b", ".a .b{color:red}.a:not(.c){color:red}"),
        (".a:not(.b) .c{color:red}", "a", ""),
        (":is(.a,.b) i{color:red}:is(.c,.d) i{color:red}", "b", ":is(.a,.b) i{color:red}"),
        (".a:has(.b,.c) i{color:red}.a:has(.d){color:red}", "a b", ".a:has(.b,.c) i{color:red}"),
        ("@keyframes x{to{top:0}}@keyframes y{to{top:0}}p{animation:1s x,2s y}", "",
         "@keyframes x{to{top:0}}@keyframes y{to{top:0}}p{animation:1s x,2s y}"),
        ("a[class*=\".x\"],b{color:red}", "", "a[class*=\".x\"],b{color:red}"),
        (".w-1\\/2{width:50%}.w-1\\/3{width:33%}", "w-1/2", ".w-1\\/2{width:50%}"),
        ("@media print{.a{color:red}}@media print{.b{color:red}}", "a", "@media print{.a{color:red}}"),
        ('.a{background:url(data:a;{b)}.b::after{content:"}"}', "a b",
         '.a{background:url(data:a;{b)}.b::after{content:"}"}'),
        ("@keyframes x{to{top:0}}@keyframes y{to{top:0}}p{animation:1s x}", "",
         "@keyframes x{to{top:0}}p{animation:1s x}"),
        ("p{--tblr-a:1;--tblr-b:var(--tblr-a);--own:2;width:var(--tblr-b)}", "",
         "p{--tblr-a:1;--tblr-b:var(--tblr-a);--own:2;width:var(--tblr-b)}"),
        ("p{--tblr-a:1;--tblr-b:var(--tblr-a);width:0}", "", "p{width:0}"),
        ("p{--tblr-a:1;width:0}", "css('--tblr-a')", "p{--tblr-a:1;width:0}"),
        ("p{color:red/* ; } */;top:0}", "", "p{color:red;top:0}"),
        ("[data-bs-theme=dark] p{top:0}[data-bs-sidebar] p{top:0}p:not([data-bs-sidebar=a]){top:0}", "data-bs-theme",
         "[data-bs-theme=dark] p{top:0}p:not([data-bs-sidebar=a]){top:0}"),
        ("[data-own-name] p{top:0}", "row.dataset.ownName = 1", "[data-own-name] p{top:0}"),
        (".st-done{color:red}.step{color:red}.st{color:red}", "st-{{ status }}", ".st-done{color:red}"),
    ],
)  # fmt: skip
def test_rules_that_no_page_can_match_are_left_out(css: str, used: str, made: str) -> None:
    assert _made(css, used) == made


@pytest.mark.parametrize("css", ["@import url(b.css);", "p{color:red;{}}", "p{color:red}}"])
def test_what_is_no_stylesheet_is_refused(css: str) -> None:
    with pytest.raises(ValueError, match=r"line 1|not supported"):
        _made(css, "")


def test_imported_stylesheets_stand_where_they_are_imported() -> None:
    files = {"a.css": '@import "x/b.css";\np{top:0}', "x/b.css": '@import "c.css";', "x/c.css": "i{top:0}"}
    assert bundles.stylesheet("a.css", files.__getitem__, set()) == "i{top:0}p{top:0}"


def test_no_class_of_a_template_is_missing(stylesheet: str) -> None:
    before, after = set(CLASS.findall(_source("vendor/tabler/tabler.min.css"))), set(CLASS.findall(stylesheet))
    used = {
        name
        for path in TEMPLATES.glob("**/*.html")
        for value in re.findall(r'class="([^"]*)"', path.read_text())
        for name in DJANGO.sub(" ", value).split()
    }
    assert used & before - after == set()
    assert len(used & before) > 80
    assert len(after) < len(before) / 3


def test_all_of_our_own_stylesheet_is_in_it(stylesheet: str) -> None:
    """Also classes whose names templates and scripts put together, and none that no page has any more."""
    sources = "".join(path.read_text() for path in (STATIC / "site").glob("*.css"))
    own = set(CLASS.findall(re.sub(r"/\*.*?\*/", "", sources, flags=re.DOTALL)))
    assert own - set(CLASS.findall(stylesheet)) == set()
    assert {one.value for one in RunStatus if f".st-{one.value}{{" not in stylesheet} == set()
    assert "@import" not in stylesheet


def test_a_module_runs_once_and_before_those_that_import_it() -> None:
    files = {
        "app.js": 'import "./js/a.js";\nimport { two as deux } from "./js/b.js";\nout.push(deux);',
        "js/a.js": 'import { one, two } from "./b.js";\nout.push(one() + two);',
        "js/b.js": "export function one() { return 1; }\nexport const two = 2;\nexport class Three {}\nout.push(0);",
    }
    made = bundles.script("app.js", files.__getitem__)
    assert made.count("modules[") - made.count("modules[name]") == 3
    assert 'const{two:deux}=use("js/b.js")' in made
    assert "return{one,two,Three}" in made
    assert not re.search(r"^(import|export)\b", made, re.MULTILINE)


def test_all_modules_that_pages_start_with_are_in_the_script() -> None:
    made = bundles.script(SCRIPT, _source)
    for path in (STATIC / "js").glob("*.js"):
        assert (
            path.name in ("admin.js", "backend-admin.js", "palette.js", "profile-form.js")
            or f'modules["js/{path.name}"]' in made
        )


def test_a_module_for_some_pages_waits_until_it_is_asked_for() -> None:
    files = {"app.js": 'const later = () => import("./js/a.js");', "js/a.js": "out.push(1);"}
    assert 'useLater("js/a.js")' in bundles.script("app.js", files.__getitem__)


def test_another_form_of_import_is_refused() -> None:
    with pytest.raises(ValueError, match=r"app\.js: this form"):
        bundles.script("app.js", {"app.js": 'import * as all from "./a.js";'}.__getitem__)


def test_pages_load_no_module_but_the_one_script() -> None:
    """A second one would run the modules that both import twice."""
    loaded = {
        found
        for path in TEMPLATES.glob("**/*.html")
        for found in re.findall(r"static '([^']+)' %\}\" type=\"module\"", path.read_text())
    }
    assert loaded == {SCRIPT}
    named = {
        found
        for path in TEMPLATES.glob("**/*.html")
        for found in re.findall(r'<meta name="script" content="([^"]+)">', path.read_text())
    }
    assert named
    assert all(f'import("./js/{name}.js")' in _source(SCRIPT) for name in named)
