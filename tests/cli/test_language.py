"""What people read in Simplified Chinese: which language a call speaks, and that its catalogue is whole."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import string
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from babel.messages.catalog import Catalog, Message
from rich.cells import cell_len
from rich.console import Console

from dstackweb.cli import language, tables
from dstackweb.cli.language import CHINESE, ENGLISH, language_of
from dstackweb.cli.options import COMMANDS
from dstackweb.cli.tables import Column, Rows, show_view
from tests.cli.conftest import Cli
from tests.support import REPO
from tools import cli_messages

SENTENCE = re.compile(r"[a-z]{2,} [a-z]+ [a-z]+")
"""English: three words in a row. Names of commands, options and keys stay as they are."""
TYPERS_OWN = (
    "^ *Usage: .*",
    "Show this message and exit.",
    "Install completion for the current shell.",
    "Show completion for the current shell, to copy it or customize the installation.",
)
OPTION = re.compile(r"--[a-z]+(?:-[a-z]+)*")
SAYING = {
    "note",
    "warn",
    "echo",
    "agreed",
    "confirm",
    "prompt",
    "Note",
    "CliError",
    "UsageError",
    "Unreachable",
    "TryLater",
}
"""The functions and errors whose texts people read."""
SCRIPT = """
import contextlib, io, json, sys
from dstackweb.cli.main import app
import typer
program = typer.main.get_command(app)
texts = {}
for words in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        try:
            program.main(words, prog_name="dstackweb")
        except SystemExit:
            pass
    texts[" ".join(words)] = out.getvalue()
print(json.dumps(texts))
"""


def spoken(*commands: list[str], **env: str) -> dict[str, str]:
    """What each command prints, without a server, in a process of its own that starts in a language."""
    surroundings = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPO), "COLUMNS": "200", "PYTHONUTF8": "1", **env}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps(commands),
        env=surroundings,
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.fixture
def chinese(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process speaks Chinese, as far as it has not read the declarations of commands yet."""
    monkeypatch.setenv("DSTACKWEB_LANGUAGE", CHINESE)
    language.choose()
    yield
    monkeypatch.setenv("DSTACKWEB_LANGUAGE", ENGLISH)
    language.choose()


@pytest.fixture(scope="module")
def catalogue() -> Catalog:
    return cli_messages.known()


def placeholders(text: str) -> set[str]:
    """The names in braces. Of a time, which each language writes in its own way, only the name."""
    return {
        name.split(".")[0] for _text, name, _spec, _conversion in string.Formatter().parse(text) if name is not None
    }


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"LANG": "zh_CN.UTF-8"}, CHINESE),
        ({"LANG": "zh_SG"}, CHINESE),
        ({"LANG": "zh"}, CHINESE),
        ({"LC_MESSAGES": "zh_Hans_CN.UTF-8", "LANG": "de_DE.UTF-8"}, CHINESE),
        ({"LC_ALL": "C.UTF-8", "LANG": "zh_CN.UTF-8"}, ENGLISH),
        ({"LC_ALL": "", "LANG": "zh_CN.GB18030"}, CHINESE),
        ({"DSTACKWEB_LANGUAGE": "zh-Hans", "LC_ALL": "C"}, CHINESE),
        ({"DSTACKWEB_LANGUAGE": "en", "LANG": "zh_CN.UTF-8"}, ENGLISH),
        ({"DSTACKWEB_LANGUAGE": "tlh", "LANG": "zh_CN.UTF-8"}, ENGLISH),
        ({"LANG": "zh_TW.UTF-8"}, ENGLISH),
        ({"LANG": "zh_Hant_HK"}, ENGLISH),
        ({"LANG": "fr_FR.UTF-8"}, ENGLISH),
        ({}, ENGLISH),
    ],
)
def test_the_language_is_that_of_the_first_variable_that_is_set(environ: dict[str, str], expected: str) -> None:
    assert language_of(environ) == expected


def test_a_terminal_that_cant_show_chinese_gets_english(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSTACKWEB_LANGUAGE", CHINESE)
    with open(os.devnull, "w", encoding="latin-1") as narrow:
        monkeypatch.setattr(sys, "stdout", narrow)
        assert language.choose() == ENGLISH


def test_the_catalogue_has_the_texts_of_the_code_and_no_others(catalogue: Catalog) -> None:
    in_code = {(message.context, message.id) for message in cli_messages.extracted() if message.id}
    in_catalogue = {(message.context, message.id) for message in catalogue if message.id}
    assert len(in_code) > 500
    assert in_catalogue == in_code, "run `make messages` and translate what is new"
    assert not catalogue.obsolete
    assert cli_messages.po_bytes(cli_messages.merged(catalogue)) == cli_messages.PO.read_bytes()


def test_every_text_is_translated_for_sure(catalogue: Catalog) -> None:
    missing = [message.id for message in catalogue if message.id and not all(strings(message))]
    fuzzy = [message.id for message in catalogue if message.id and message.fuzzy]
    assert (missing, fuzzy) == ([], [])


def test_the_compiled_catalogue_is_that_of_the_text(catalogue: Catalog) -> None:
    assert cli_messages.MO.read_bytes() == cli_messages.mo_bytes(cli_messages.merged(catalogue))


def test_translations_have_the_placeholders_of_their_texts(catalogue: Catalog) -> None:
    differing = [
        message.id
        for message in catalogue
        if message.id
        for text in strings(message)
        if placeholders(text) != placeholders(original(message))
        or set(OPTION.findall(text)) != set(OPTION.findall(original(message)))
    ]
    assert differing == []


def strings(message: Message) -> tuple[str, ...]:
    return (message.string,) if isinstance(message.string, str) else tuple(message.string)


def original(message: Message) -> str:
    return message.id if isinstance(message.id, str) else str(message.id[-1])


def test_the_help_of_every_command_is_in_chinese() -> None:
    helps = spoken(*[[*name.split(), "--help"] for name in COMMANDS], ["--help"], DSTACKWEB_LANGUAGE=CHINESE)
    assert len(helps) > 40
    for words, text in helps.items():
        said = re.sub("|".join(TYPERS_OWN), "", text, flags=re.MULTILINE)
        said = re.sub(r"dstackweb [a-z].*?(?=:|$)|\S*[-_/.=|:]\S*", "", said, flags=re.MULTILINE)
        assert re.search(r"[\u4e00-\u9fff]{2}", said), words
        assert not SENTENCE.search(said), (words, SENTENCE.search(said))


def test_errors_of_commands_are_in_chinese_and_those_of_typer_in_english() -> None:
    ours = (["ps", "--json", "--quiet"], ["ps", "--status", "x"], ["ps"], ["servers", "list"])
    typers = (["apply"], ["show", "a", "b"], ["stpo"], ["ps", "--limit", "x"], ["ps", "--foo"], ["usage", "--by", "x"])
    said = spoken(*ours, *typers, LANG="zh_CN.UTF-8")
    for words in ours:
        assert re.search(r"[\u4e00-\u9fff]{2}", said[" ".join(words)]), said[" ".join(words)]
        assert not SENTENCE.search(re.sub(r"'?dstackweb [a-z]+", "", said[" ".join(words)]))
    for words in typers:
        assert re.match(r"Usage: dstackweb", said[" ".join(words)])


def test_columns_stand_below_each_other_where_characters_are_wide(
    chinese: None, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = [Column("NAME"), Column("PRIO", right=True), Column("USER")]
    show_view([Rows(columns, [("训练", 5, "ada"), ("b", 100, "小明")])])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["名称", "优先级", "用户"]
    starts = [cell_len(line[: line.rindex(line.split()[-1])]) for line in lines]
    ends = [
        cell_len(line[: line.index(cell) + len(cell)]) for line, cell in zip(lines, ("优先级", "5", "100"), strict=True)
    ]
    assert len(set(starts)) == len(set(ends)) == 1


def test_a_text_is_cut_to_cells() -> None:
    assert [tables.cut("队列 a", width) for width in (7, 6, 5, 3, 1)] == ["队列 a", "队列 a", "队列 ", "队", ""]


def test_long_chinese_text_is_broken_into_lines_and_nothing_of_it_is_lost(chinese: None) -> None:
    text = "以 JSON 格式打印 API 的响应，只用于程序（见文档）：“原样”。"
    for width in range(8, 40):
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(tables.Rows([Column("VALUE", wide=True)], [[text]]).drawn())
        lines = [line.strip() for line in console.export_text().splitlines()][2:]
        assert re.sub(r"\s", "", "".join(lines)) == re.sub(r"\s", "", text), width
        assert all(cell_len(line) <= width for line in lines), (width, lines)


def test_times_and_codes_have_their_words(chinese: None) -> None:
    assert [language.duration_text(seconds) for seconds in (5, 90, 5400, 90000)] == [
        "5 秒",
        "1 分钟",
        "1 小时 30 分钟",
        "1 天 1 小时",
    ]
    assert language.size_text(17) == "17 字节"
    assert language.size_text(5 << 20) == "5 MB"
    assert language.word("running") == "运行中"
    assert language.word("a-run-of-its-own") == "a-run-of-its-own"
    assert re.fullmatch(r"11月\d+日 \d\d:\d\d", language.clock_text("2020-11-06T10:00:00+00:00"))


@pytest.mark.django_db
def test_what_programs_read_stays_english(cli: Cli) -> None:
    cli.ok(
        "apply",
        "-f",
        cli.file("type: task\nname: one\ncommands: [a]\nresources: {gpu: 8}\n"),
        "-y",
        "-d",
        "--no-code",
        "--force",
    )
    said = cli.ok("ps", DSTACKWEB_LANGUAGE=CHINESE)
    assert "名称" in said
    assert "已提交" in said
    assert cli("ps", "--json", DSTACKWEB_LANGUAGE=CHINESE).stdout == cli.ok("ps", "--json")
    assert cli("ps", "-q", DSTACKWEB_LANGUAGE=CHINESE).stdout == cli.ok("ps", "-q")
    missing = cli("show", "gone", DSTACKWEB_LANGUAGE=CHINESE)
    assert missing.exit_code == cli("show", "gone").exit_code == 1
    assert missing.stderr.startswith("错误：")


def test_the_server_is_asked_for_the_same_language(chinese: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx

    from dstackweb.cli.client import Api
    from dstackweb.cli.config import GIVEN, Settings

    monkeypatch.delitem(GIVEN, "form", raising=False)  # an earlier test's command may have had --json
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.headers["Accept-Language"])
        return httpx.Response(200, json={})

    Api(Settings("http://localhost", "t", "main", ""), httpx.MockTransport(answer)).get("/api/v1/user")
    assert asked == ["zh-Hans"]


def test_what_commands_say_is_marked_for_translation() -> None:
    unmarked = [
        f"{file.name}:{argument.lineno}"
        for file in sorted(Path(language.__file__).parent.glob("*.py"))
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call) and getattr(call.func, "id", getattr(call.func, "attr", "")) in SAYING
        for argument in [branch for given in call.args for branch in branches(given)]
        if re.search("[A-Za-z]{2}", plain(argument).replace("dstackweb", ""))
    ]
    assert unmarked == []


def branches(expression: ast.expr) -> list[ast.expr]:
    if isinstance(expression, ast.IfExp):
        return [*branches(expression.body), *branches(expression.orelse)]
    return [expression]


def plain(expression: ast.expr) -> str:
    """The text that stands in the code as it is shown."""
    parts = expression.values if isinstance(expression, ast.JoinedStr) else [expression]
    return " ".join(part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str))
