from __future__ import annotations

import os
import tarfile
from datetime import UTC, datetime
from io import StringIO

import pytest
from django.conf import LazySettings, settings

from dstackweb.accounts.models import Membership, Project, User
from dstackweb.cli.apply import LocalRunFile, explain
from dstackweb.cli.language import clock_text
from dstackweb.cli.output import ApiError
from dstackweb.cli.plan import view_of
from dstackweb.cli.tables import show_view
from dstackweb.runs.models import Archive, Run
from dstackweb.runs.recurrence import next_time
from tests.cli.conftest import Cli
from tests.factories import make_host, make_run

HELLO = "type: task\nname: hello\ncommands: [echo hello]\n"


@pytest.fixture(autouse=True)
def host(db: None) -> None:
    make_host()


def test_the_plan_shows_each_setting_with_its_source_the_offers_and_the_position(cli: Cli) -> None:
    """R26: the same plan as the page's."""
    cli.file(HELLO + "priority: 60\nmax_duration: 90m\nresources: {memory: 2GB..}\nenv: {LR: '1e-4'}\n")
    printed = cli.ok("apply", "-f", "run.yaml", "--dry-run", "-e", "SEED=1")
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    for row in (
        "priority 60 line 4",
        "max_duration 90m line 5",
        "resources.memory 2GB.. line 6",
        "resources.cpu 1.. default",
        "backends [hosts] profile default",
    ):
        assert row in lines
    assert any(line.startswith("env LR: 1e-4, SEED: 1") for line in lines)
    assert "hosts box-1 8 32 GB – own idle" in lines
    assert any(line.startswith("Position 1 in queue default") for line in lines)
    assert f"Code: 1 file in {cli.work}" in printed
    assert not Run.objects.exists()
    assert not Archive.objects.exists()


def test_a_command_of_several_lines_is_shown_line_by_line(cli: Cli) -> None:
    cli.file("type: task\ncommands:\n  - |\n    for i in 1 2; do\n      echo $i\n    done\n")
    printed = cli.ok("apply", "-f", "run.yaml", "--dry-run").splitlines()
    at = next(number for number, line in enumerate(printed) if line.startswith("commands"))
    assert [line.split("  ", 1)[1].strip() for line in printed[at + 1 : at + 3]] == ["echo $i", "done"]


def test_apply_with_yes_and_detach_prints_no_plan(cli: Cli) -> None:
    cli.file(HELLO)
    printed = cli("apply", "-f", "run.yaml", "-y", "-d")
    assert printed.stdout == "hello\n"
    assert printed.stderr == (
        "Position 1 in queue default; can start now\nSubmitted hello. To follow: dstackweb logs -f hello\n"
    )


def test_the_command_line_overrides_the_file(cli: Cli) -> None:
    cli.file(HELLO + "env: {LR: '1', SEED: '1'}\n")
    name = cli.ok(
        "apply", "-f", "run.yaml", "-d", "--name", "other", "--priority", "70", "-e", "LR=2", "-e", "HERE", HERE="yes"
    )
    run = Run.objects.get(name=name.strip())
    assert (run.name, run.priority) == ("other", 70)
    assert run.spec["env"] == {"LR": "2", "SEED": "1", "HERE": "yes"}


def test_bare_env_names_get_local_values_that_are_never_stored_in_plain_text(cli: Cli) -> None:
    cli.file(HELLO + "env: [HF_TOKEN, LR=1]\n")
    shown = cli.ok("apply", "-f", "run.yaml", "--dry-run", HF_TOKEN="hf_secret")
    assert "HF_TOKEN: ********" in shown
    cli.ok("apply", "-f", "run.yaml", "-d", HF_TOKEN="hf_secret")
    run = Run.objects.get()
    assert run.spec["masked_env"] == ["HF_TOKEN"]
    assert "hf_secret" not in str(run.spec) + run.config_text + run.env_secret
    refused = cli("apply", "-f", "run.yaml", "--name", "two", "-d")
    assert refused.exit_code == 1
    assert "copies HF_TOKEN from your shell" in refused.stderr


def test_an_error_in_the_file_is_shown_as_a_compiler_would(cli: Cli) -> None:
    cli.file("type: task\ncommands: [echo hi]\nresources:\n  cpu: 2\n  gpuu: A100\n", "bad.yaml")
    refused = cli("apply", "-f", "bad.yaml", "-d")
    assert refused.exit_code == 1
    assert refused.stdout == ""
    printed = refused.stderr.splitlines()
    assert printed[0].startswith("error: the run is invalid")
    assert printed[1:4] == ["   --> bad.yaml:5:3", "    |", "  5 |   gpuu: A100"]
    assert printed[4].startswith("    |   ^^^^ unknown key `resources.gpuu`; did you mean `resources.gpu`?")
    assert not Run.objects.exists()


def test_each_error_of_the_file_is_shown_and_one_of_the_command_line_without_a_place(cli: Cli) -> None:
    cli.file("type: task\ncommands: [a]\nnodes: two\npriorty: 3\n")
    printed = cli("apply", "-f", "run.yaml", "-d").stderr
    assert "run.yaml:3:1" in printed
    assert "run.yaml:4:1" in printed
    cli.file(HELLO)
    printed = cli("apply", "-f", "run.yaml", "-d", "--priority", "900").stderr
    assert "priority" in printed
    assert "900" in printed
    assert "-->" not in printed


def test_an_invalid_run_file_is_refused_without_a_traceback(cli: Cli) -> None:
    for text in ("", "commands: [a\n", "\tx", "- a\n", "a: &a [*a]\n", "[" * 2000):
        cli.file(text)
        refused = cli("apply", "-f", "run.yaml", "-d")
        assert refused.exit_code == 1
        assert refused.stderr.startswith("error: ")


def test_a_file_that_is_not_there_not_text_or_too_large_is_refused_before_anything_is_sent(cli: Cli) -> None:
    (cli.work / "binary").write_bytes(b"type: task\n\xff\xfe")
    (cli.work / "large").write_bytes(b"#" * 300_000)
    for name, words in (
        ("gone", "No such file"),
        (".", "Is a directory"),
        ("binary", "not valid UTF-8 (line 2)"),
        ("large", "exceeds 256 KB"),
    ):
        refused = cli("apply", "-f", name, "-d")
        assert refused.exit_code == 1
        assert words in refused.stderr


def test_a_run_file_comes_from_stdin(cli: Cli) -> None:
    cli.ok("apply", "-f", "-", "-d", "--no-code", input=HELLO)
    assert Run.objects.get().config_text == HELLO
    refused = cli("apply", "-f", "-", "-d", "--no-code", input="type: task\nnmae: hello\ncommands: [x]\n")
    assert "stdin:2" in refused.stderr
    refused = cli("apply", "-f", "-", "-d", "--no-code", input="")
    assert refused.exit_code == 1
    assert refused.stderr.startswith("error: ")


def test_the_directory_is_uploaded_once_without_ignored_files(cli: Cli) -> None:
    cli.file(HELLO)
    for name, text in ((".gitignore", "*.bin\n"), ("model.bin", "x"), ("src/train.py", "pass"), (".git/HEAD", "ref")):
        (cli.work / name).parent.mkdir(exist_ok=True)
        (cli.work / name).write_text(text)
    cli.ok("apply", "-f", "run.yaml", "-d", "--name", "one")
    archive = Run.objects.get(name="one").archive
    assert archive is not None
    with tarfile.open(settings.DSTACKWEB_HOME / archive.key) as tar:
        assert tar.getnames() == [".gitignore", "run.yaml", "src/train.py"]
    cli.ok("apply", "-f", "run.yaml", "-d", "--name", "two")
    assert Run.objects.get(name="two").archive == archive
    assert Archive.objects.count() == 1
    cli.ok("apply", "-f", "run.yaml", "-d", "--no-code", "--name", "three")
    assert Run.objects.get(name="three").archive is None


def test_code_over_the_server_s_limit_is_refused_before_anything_is_sent(cli: Cli, settings: LazySettings) -> None:
    settings.DSTACKWEB_ARCHIVE_LIMIT_MB = 1
    cli.file(HELLO)
    (cli.work / "weights.bin").write_bytes(os.urandom(1 << 21))
    refused = cli("apply", "-f", "run.yaml", "-d")
    assert refused.exit_code == 1
    assert "exceeds the limit of 1 MB" in refused.stderr
    assert "2 MB  weights.bin" in refused.stderr
    assert not Run.objects.exists()


def test_an_impossible_run_needs_confirmation_or_force(cli: Cli) -> None:
    cli.file(HELLO + "resources: {gpu: 'H100:16'}\n")
    refused = cli("apply", "-f", "run.yaml", "-d", "-y")
    assert refused.exit_code == 1
    assert "warning:" in refused.stderr
    assert "--force" in refused.stderr
    said_no = cli("apply", "-f", "run.yaml", "-d", input="n\n")
    assert (said_no.exit_code, Run.objects.count()) == (1, 0)
    assert "Nothing was submitted" in said_no.stderr
    cli.ok("apply", "-f", "run.yaml", "-d", "--name", "asked", input="y\n")
    cli.ok("apply", "-f", "run.yaml", "-d", "--name", "forced", "--force")
    assert Run.objects.count() == 2


def test_the_name_of_an_active_run_is_refused(cli: Cli) -> None:
    cli.file(HELLO)
    cli.ok("apply", "-f", "run.yaml", "-d")
    refused = cli("apply", "-f", "run.yaml", "-d")
    assert refused.exit_code == 1
    assert "Nothing was submitted. Choose another name" in refused.stderr
    assert Run.objects.count() == 1


def test_a_viewer_can_not_submit(cli: Cli) -> None:
    Membership.objects.update(role="viewer")
    cli.file(HELLO)
    refused = cli("apply", "-f", "run.yaml", "-d")
    assert refused.exit_code == 1
    assert "member" in refused.stderr


def test_a_variable_that_cannot_be_set_is_a_usage_error(cli: Cli) -> None:
    cli.file(HELLO)
    for pair in ("=x", "1A=x", "A B=x", "NOT_SET_ANYWHERE"):
        assert cli("apply", "-f", "run.yaml", "-e", pair).exit_code == 2


def test_the_position_in_the_plan_counts_the_runs_ahead(cli: Cli, project: Project, ada: User) -> None:
    for _ in range(3):
        make_run(project, ada, priority=70)
    cli.file(HELLO)
    assert "Position 4 in queue default" in cli.ok("apply", "-f", "run.yaml", "--dry-run")


def test_the_caret_is_under_the_key_also_after_wide_characters_and_tabs() -> None:
    def pointed(text: str, **error: object) -> list[str]:
        body: dict[str, object] = {"errors": [{"loc": [], "line": 1, "msg": "wrong", **error}]}
        return list(explain(ApiError("no", status=422, body=body), LocalRunFile("f", text)).notes)

    assert pointed("resources: {cpu: 1, gpu: x}", loc=["resources", "gpu"])[-2:] == [
        "1 | resources: {cpu: 1, gpu: x}",
        "  |                     ^^^ wrong",
    ]
    assert pointed("名字: {gpu: x}", loc=["gpu"])[-1] == "  |        ^^^ wrong"
    assert pointed("a:\tgpu", loc=["gpu"])[-1] == "  |   \t^^^ wrong"
    assert pointed("  - x y", loc=["commands", 0])[-1] == "  |     ^ wrong"
    assert pointed("a: [b", loc=[], col=4)[-1] == "  |    ^ wrong"
    assert pointed("a", loc=["x"], line=7) == ["x: wrong"]
    assert pointed("", loc=[])[-1] == "wrong"


def test_the_plan_of_a_run_with_a_schedule_shows_when_it_enters_its_queue(cli: Cli) -> None:
    cli.file("type: task\nname: nightly\ncommands: [a]\nschedule: {cron: '0 2 * * *'}\n")
    shown = cli.ok("apply", "-f", "run.yaml", "--dry-run")
    at = next_time(["0 2 * * *"], datetime.now(UTC))
    assert f"Enters queue default at {clock_text(at.isoformat())}; can start now" in shown
    assert "Position" not in shown


def test_the_plan_shows_spot_and_on_demand_prices(cli: Cli) -> None:
    offer = {
        "backend": "aws", "region": "eu-west-1", "instance_type": "m5.large", "cpus": 2, "memory_mib": 8192,
        "gpu_count": 0, "gpu_name": "", "gpu_memory_mib": 0, "price": 0.0665, "spot": True,
        "availability": "available", "detail": {},
    }  # fmt: skip
    dear = offer | {"price": 0.1066, "spot": False}
    plan = {
        "settings": {}, "provenance": {}, "offers": [offer, dear], "queue": "default", "next_at": None, "position": 1,
        "reason": None, "reason_detail": None,
    }  # fmt: skip
    printed = StringIO()
    outlook = {"backend": "aws", "used": False, "starts": True, "price": 3.06, "reason": None, "reason_detail": None}
    full = {"backend": "hosts", "used": True, "starts": False, "price": 0.0, "reason_detail": "needs 2 GPUs, 1 free"}
    show_view(view_of([plan | {"backends": [full, outlook]}], "none"), printed)
    rows = [line.split() for line in printed.getvalue().splitlines() if "m5.large" in line]
    compared = [
        " ".join(line.split()) for line in printed.getvalue().splitlines() if line.startswith(("aws  ", "hosts"))
    ]
    assert compared == ["hosts needs 2 GPUs, 1 free –", "aws now (not used) $3.06"]
    assert [row[-3:] for row in rows] == [["$0.0665", "spot", "available"], ["$0.1066", "on-demand", "available"]]
