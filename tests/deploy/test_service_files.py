"""What is in the units, the Containerfile and compose.yaml exists in the program."""

from __future__ import annotations

import re
from configparser import RawConfigParser
from pathlib import Path

import pytest
import yaml
from django.core.management import get_commands, load_command_class
from django.urls import resolve

from dstackweb.cli.main import app
from dstackweb.lib.process import REFUSED
from dstackweb.runner.host_agent import NEVER
from tests.support import REPO

UNITS = sorted((REPO / "deploy" / "systemd").glob("*.service"))
CONTAINERFILE = (REPO / "Containerfile").read_text()


def service(path: Path) -> dict[str, str]:
    parser = RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(path.read_text())
    return dict(parser["Service"])


def check_manage(argv: list[str]) -> None:
    """These words are a management command and its options."""
    command = load_command_class(get_commands()[argv[0]], argv[0])
    command.create_parser("manage.py", argv[0]).parse_args(argv[1:])


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_units_start_existing_commands_and_do_not_kill_jobs(path: Path) -> None:
    found = service(path)
    program, *argv = found["ExecStart"].split()
    assert program.startswith("/opt/dstackweb/.venv/bin/")
    if argv[0] == "manage.py":
        check_manage(argv[1:])
        assert (found["Type"], found["ExecReload"]) == ("notify", "/bin/kill -HUP $MAINPID")
        final = REFUSED
    else:
        assert argv == ["host", "run"]
        assert "host" in {group.name for group in app.registered_groups}
        final = NEVER
    assert found["RestartPreventExitStatus"] == str(final)
    has_jobs = "--no-host" not in argv
    assert found["KillMode"] == ("process" if has_jobs else "mixed")
    assert ("User" in found, found.get("Delegate")) == (not has_jobs, "yes" if has_jobs else None)


def test_the_container_runs_unprivileged_and_its_health_check_address_answers() -> None:
    assert re.search(r"^ARG PYTHON=\S+:\d+\.\d+\.\d+-slim-\w+$", CONTAINERFILE, re.MULTILINE)
    assert re.findall(r"^USER (.*)$", CONTAINERFILE, re.MULTILINE) == ["10001:10001"]
    assert "--require-hashes" in CONTAINERFILE
    [path] = re.findall(r"'(/\w+)', timeout", CONTAINERFILE)
    assert resolve(path).route == "readyz"
    [argv] = re.findall(r"^CMD (\[.*\])$", CONTAINERFILE, re.MULTILINE)
    check_manage(yaml.safe_load(argv))
    for source in re.findall(r"^COPY (?!--from)(.+) \S+$", CONTAINERFILE, re.MULTILINE):
        assert all((REPO / name).exists() for name in source.split())


def test_compose_starts_the_server_only_with_a_profile() -> None:
    services = yaml.safe_load((REPO / "compose.yaml").read_text())["services"]
    assert [name for name, one in services.items() if "profiles" not in one] == ["postgres", "redis"]
    assert set(services["server"]["depends_on"]) == {"postgres", "redis"}
