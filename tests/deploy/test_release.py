"""The release workflow calls what the repository has, publishes only what was tested, and refuses a wrong tag."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import dstackweb
from tests.support import REPO

WORKFLOWS = REPO / ".github" / "workflows"
RELEASE: dict[str, Any] = yaml.safe_load((WORKFLOWS / "release.yml").read_text())
JOBS: dict[str, dict[str, Any]] = RELEASE["jobs"]
VERSION = dstackweb.__version__
DATED = f"""# Changelog

## {VERSION} (2026-12-01)

### Runs

- Are [listed](docs/queue.md#saved-views).

## 0.0.9 (2026-11-01)

- Old.
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout with what a release looks at, ready for its tag."""
    for name in ("dstackweb/__init__.py", "tools/release.py", "Containerfile"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPO / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text(DATED)
    return tmp_path


def release(tree: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "tools.release", *argv]
    return subprocess.run(words, cwd=tree, capture_output=True, text=True, check=False)


def test_this_version_and_the_changelog_fit_each_other() -> None:
    checked = release(REPO, "check")
    assert (checked.stdout, checked.stderr) == (f"{VERSION}\n", "")


def test_a_tag_of_this_version_is_released_once_the_changelog_has_its_date(tree: Path) -> None:
    assert release(tree, "check", f"v{VERSION}").stdout == f"{VERSION}\n"
    (tree / "CHANGELOG.md").write_text(DATED.replace("2026-12-01", "unreleased"))
    assert release(tree, "check").returncode == 0
    refused = release(tree, "check", f"v{VERSION}")
    assert refused.returncode == 1
    assert "is unreleased: write the date" in refused.stderr


@pytest.mark.parametrize("tag", ["v9.9.9", VERSION, f"v{VERSION}.post1", f"release-{VERSION}"])
def test_another_tag_is_refused(tree: Path, tag: str) -> None:
    refused = release(tree, "check", tag)
    assert refused.returncode == 1
    assert f"it must be v{VERSION}" in refused.stderr


@pytest.mark.parametrize("text", [DATED.replace(VERSION, "9.9.9"), "# Changelog\n", f"## {VERSION} (soon)\n\n- New.\n"])
def test_a_changelog_without_this_version_is_refused(tree: Path, text: str) -> None:
    (tree / "CHANGELOG.md").write_text(text)
    assert "CHANGELOG.md must begin with" in release(tree, "check").stderr


def test_a_version_that_packages_write_otherwise_is_refused(tree: Path) -> None:
    (tree / "dstackweb" / "__init__.py").write_text('__version__ = "1.0-rc.1"\n')
    assert "is not a version such as" in release(tree, "check").stderr


def test_notes_are_the_part_of_this_version_with_links_into_the_tag(tree: Path) -> None:
    assert release(tree, "notes").stdout == "### Runs\n\n- Are [listed](docs/queue.md#saved-views).\n"
    assert (
        "[listed](https://x.example/blob/v1/docs/queue.md#saved-views)"
        in release(tree, "notes", "https://x.example/blob/v1").stdout
    )
    linked = re.findall(r"\]\(https://x/([^)#]+)", release(REPO, "notes", "https://x").stdout)
    assert linked
    assert all((REPO / path).exists() for path in linked)


def test_the_base_of_the_image_is_pinned_by_the_digest_that_docker_names(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for docker buildx, which asks a registry, prints the digest and notes what it was asked."""
    digest = f"sha256:{'0a' * 32}"
    docker = tmp_path / "bin" / "docker"
    docker.parent.mkdir()
    docker.write_text(f'#!/bin/sh\necho "$*" > {tmp_path}/asked\necho {digest}\n')
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{docker.parent}:/usr/bin:/bin")
    pinned = release(tree, "base")
    argument, _, image = pinned.stdout.strip().removesuffix(f"@{digest}").partition("=")
    assert f"ARG {argument}={image}\n" in (tree / "Containerfile").read_text()
    assert (tmp_path / "asked").read_text().startswith(f"buildx imagetools inspect {image} ")
    docker.write_text("#!/bin/sh\necho latest\n")
    assert "gave no digest" in release(tree, "base").stderr


def test_workflows_call_targets_files_and_commands_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (REPO / "Makefile").read_text(), re.MULTILINE))
    called = set()
    for path in WORKFLOWS.glob("*.yml"):
        jobs = yaml.safe_load(path.read_text())["jobs"].values()
        for script in [step["run"] for job in jobs for step in job.get("steps", ()) if "run" in step]:
            subprocess.run(["bash", "-n", "-c", script], check=True)
            assert "${{" not in script, "values go through the environment, where they are not parsed as shell"
            called |= set(re.findall(r"\bmake ([a-z-]+)", script))
            for command in re.findall(r"-m tools\.release (\w+)", script):
                assert f'case "{command}":' in (REPO / "tools" / "release.py").read_text()
        for job in jobs:
            if "uses" in job:
                assert "workflow_call:" in (REPO / job["uses"]).read_text()
    assert {"dist", "docs", "audit"} <= called <= targets


def test_actions_are_pinned_to_a_major_version() -> None:
    used = [line for path in WORKFLOWS.glob("*.yml") for line in re.findall(r"uses: (\S+)", path.read_text())]
    assert [name for name in used if not re.search(r"^\./|@(v\d+|release/v\d+|[0-9a-f]{40})$", name)] == []


def test_nothing_is_published_before_all_was_checked_built_and_tested() -> None:
    def before(name: str) -> set[str]:
        needs = JOBS[name].get("needs", [])
        direct = {needs} if isinstance(needs, str) else set(needs)
        return direct.union(*map(before, direct))

    publishes = {name for name, job in JOBS.items() if set(job["permissions"].values()) != {"read"}}
    assert publishes == {"image", "pypi", "pages", "release"}
    assert all({"check", "test", "dist", "docs"} <= before(name) for name in publishes)
    assert "image" in before("pypi"), "files on PyPI can't be replaced, so they go there last"


def test_each_job_has_only_the_rights_that_it_needs() -> None:
    assert RELEASE["permissions"] == {}
    assert {name: job["permissions"] for name, job in JOBS.items()} == {
        **{name: {"contents": "read"} for name in ("check", "test", "dist", "docs")},
        "image": {"contents": "read", "packages": "write"},
        "pypi": {"id-token": "write"},
        "pages": {"pages": "write", "id-token": "write"},
        "release": {"contents": "write"},
    }
    assert "secrets." not in (WORKFLOWS / "release.yml").read_text(), "trusted publishing stores no password"


def test_ci_runs_each_python_that_the_makefile_takes() -> None:
    matrix = yaml.safe_load((WORKFLOWS / "ci.yml").read_text())["jobs"]["test"]["strategy"]["matrix"]["python"]
    taken = re.findall(r"python(3\.\d+)", (REPO / "tools" / "venv").read_text())
    assert sorted(set(taken)) == sorted(matrix)
