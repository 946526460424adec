"""What is in the units, the Containerfile and compose.yaml exists in the program."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from configparser import RawConfigParser
from pathlib import Path
from uuid import uuid4

import pytest
import yaml
from django.core.management import get_commands, load_command_class
from django.urls import resolve

from dstackweb import manage
from dstackweb.cli.hosts import app as host_commands
from dstackweb.lib.process import REFUSED
from dstackweb.runner import cgroups, sandbox
from dstackweb.runner.host_agent import NEVER
from tests.support import REPO

UNITS = sorted((REPO / "deploy" / "systemd").glob("*.service"))
UNITS = [path for path in UNITS if "backup" not in path.name]  # test_backup_timer.py
CONTAINERFILE = (REPO / "Containerfile").read_text()
SERVICES = yaml.safe_load((REPO / "compose.yaml").read_text())["services"]


def service(path: Path) -> dict[str, str]:
    parser = RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(path.read_text())
    return dict(parser["Service"])


def check_manage(argv: list[str]) -> None:
    """These words are a management command and its options."""
    command = load_command_class(get_commands()[argv[0]], argv[0])
    command.create_parser("dstackweb-server", argv[0]).parse_args(argv[1:])


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_units_start_existing_commands_and_do_not_kill_jobs(path: Path) -> None:
    found = service(path)
    program, *argv = found["ExecStart"].split()
    assert Path(program).parent == Path("/opt/dstackweb/.venv/bin")
    if Path(program).name == "dstackweb-server":
        check_manage(argv)
        assert (found["Type"], found["ExecReload"]) == ("notify", "/bin/kill -HUP $MAINPID")
        final = REFUSED
    else:
        assert (Path(program).name, argv) == ("dstackweb", ["host", "run"])
        assert "run" in {command.name for command in host_commands.registered_commands}
        final = NEVER
    assert found["RestartPreventExitStatus"] == str(final)
    has_jobs = "--no-host" not in argv
    assert found["KillMode"] == ("process" if has_jobs else "mixed")
    assert ("User" in found, found.get("Delegate")) == (not has_jobs, "yes" if has_jobs else None)


def test_the_help_of_the_server_names_existing_commands() -> None:
    lines = re.findall(r"^  (\w.{18}) ", manage.HELP, re.MULTILINE)
    assert len(lines) > 9
    for line in lines:
        check_manage([{"RUN_ID": str(uuid4())}.get(word, word) for word in line.split()])


JOB_UNITS = [path for path in UNITS if "Delegate" in service(path)]
MAKES = """
import json, os, tempfile
from pathlib import Path
from dstackweb.runner import cgroups, namespaces, sandbox
from dstackweb.runner.isolation import PROJECT_UIDS, account_of
from dstackweb.scheduler.processes import protection
protection.TABLES = Path(tempfile.mkdtemp())
ports = protection.close_ports(Path("/"), PROJECT_UIDS, {"ENGINE": "sqlite3"}, "redis://127.0.0.1:6379", 8000)
with namespaces.opened(os.getpid(), "mnt") as (mounts,):
    namespaces.join(mounts)
print(json.dumps([sandbox.obstacle(account_of(PROJECT_UIDS, 0)), cgroups.support(), ports]))
"""


@pytest.mark.slow
@pytest.mark.needs("root")
@pytest.mark.parametrize("path", JOB_UNITS, ids=lambda path: path.name)
def test_services_that_start_jobs_keep_the_rights_for_sandboxes_cgroups_and_closed_ports(path: Path) -> None:
    kept = set(re.findall(r"CAP_\w+", path.read_text()))
    assert set(sandbox.ENTERS_WITH) <= kept, "else bwrap drops none"
    bounding = ",".join(["-all", *(f"+{right.removeprefix('CAP_').lower()}" for right in sorted(kept))])
    rights = ["setpriv", f"--bounding-set={bounding}", "--inh-caps=-all"]
    env = {"PATH": os.environ["PATH"], "DJANGO_SETTINGS_MODULE": "dstackweb.settings", "PYTHONPATH": str(REPO)}
    argv = ["unshare", "--net", *rights, sys.executable, "-c", f"import django; django.setup()\n{MAKES}"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, env=os.environ | env)
    obstacle, made, ports = json.loads(done.stdout)
    assert (obstacle, made) == ("", cgroups.support())
    joined = path.name == "dstackweb-host.service"
    assert ports == ("open" if joined else "closed"), "a joined machine has neither database nor Redis of the server"


@pytest.mark.parametrize("path", JOB_UNITS, ids=lambda path: path.name)
def test_services_that_start_jobs_leave_them_gpus_and_the_machine_processes(path: Path) -> None:
    found = service(path)
    assert not {"ProtectClock", "PrivateDevices", "DeviceAllow", "DevicePolicy", "NoNewPrivileges"} & set(found)
    assert not {"RestrictNamespaces", "ProtectControlGroups", "PrivateUsers", "SystemCallFilter"} & set(found)
    assert found["TasksMax"] == "80%"


@pytest.mark.needs("systemd")
def test_systemd_understands_the_units(tmp_path: Path) -> None:
    for path in UNITS:  # the programs are not installed here
        (tmp_path / path.name).write_text(re.sub("^ExecStart=.*", "ExecStart=/bin/true", path.read_text(), flags=re.M))
    argv = ["systemd-analyze", "verify", *(str(tmp_path / path.name) for path in UNITS)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert not [line for line in done.stderr.splitlines() if str(tmp_path) in line]


def test_the_container_runs_unprivileged_and_its_health_check_address_answers() -> None:
    assert re.findall(r"^USER (.*)$", CONTAINERFILE, re.MULTILINE) == ["10001:10001"]
    assert "--require-hashes" in CONTAINERFILE
    [path] = re.findall(r"'(/\w+)', headers", CONTAINERFILE)
    assert resolve(path).route == "readyz"
    [argv] = re.findall(r"^CMD (\[.*\])$", CONTAINERFILE, re.MULTILINE)
    check_manage(yaml.safe_load(argv))


def test_the_build_is_sent_what_it_copies_and_nothing_else() -> None:
    copied = " ".join(re.findall(r"^COPY (?!--from)(.+) \S+$", CONTAINERFILE, re.MULTILINE)).split()
    assert all((REPO / name).exists() for name in copied)
    sent = re.findall(r"^!(.+)$", (REPO / ".dockerignore").read_text(), re.MULTILINE)
    assert sorted(sent) == sorted(copied)


def test_compose_starts_the_server_only_with_a_profile() -> None:
    assert [name for name, service in SERVICES.items() if "profiles" not in service] == ["postgres", "redis"]
    assert set(SERVICES["server"]["depends_on"]) == {"postgres", "redis"}


def test_the_image_has_the_client_of_the_postgresql_that_compose_starts() -> None:
    [major] = re.findall(r"^ARG PG_MAJOR=(\d+)$", CONTAINERFILE, re.MULTILINE)
    assert SERVICES["postgres"]["image"] == f"postgres:{major}"
