"""What is shipped is what git would list: proven against git itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, strategies as st

from dstackweb.cli import archive
from dstackweb.cli.archive import entries
from tests.support import examples

NAMES = ["a", "b", "ab", "a.py", "b.txt", "build", "Build", "x y", "é", "#c", "!d", "[e]", ".env"]
GLOBS = [*NAMES, "*", "**", "*.py", "?", "a*", "*b", "[ab]", "[!a]", "[^a]", "[a-c]*", "b*d", "\\#c", "\\!d", "x\\ y"]
ODD_LINES = [
    "",
    "# a",
    "a ",
    "a\\ ",
    " a",
    "a\r",
    "!",
    "/",
    "//",
    "**/",
    "/**",
    "/*",
    "[a",
    "a[",
    "\\",
    "***",
    "a/**/b",
]

path = st.lists(st.sampled_from(NAMES), min_size=1, max_size=4).map("/".join)
glob = st.builds(
    lambda no, lead, parts, tail: f"{no}{lead}{'/'.join(parts)}{tail}",
    st.sampled_from(["", "", "!"]),
    st.sampled_from(["", "/", "**/"]),
    st.lists(st.sampled_from(GLOBS), min_size=1, max_size=3),
    st.sampled_from(["", "", "/", "/*", "/**"]),
)
lines = st.lists(st.one_of(glob, st.sampled_from(ODD_LINES)), min_size=1, max_size=5)
ignore_files = st.dictionaries(st.one_of(st.just(""), path), lines, max_size=3)


def git(repository: Path, *arguments: str) -> bytes:
    """Git without anybody's own configuration."""
    env = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1"}
    return subprocess.run(["git", *arguments], cwd=repository, env=env, check=True, capture_output=True).stdout


def listed_by_git(directory: Path) -> list[str]:
    found = git(directory, "ls-files", "-co", "--exclude-standard", "-z")
    return sorted(os.fsdecode(name) for name in found.split(b"\0") if name)


def shipped(directory: Path) -> list[str]:
    return sorted(entry.path for entry in entries(directory))


@pytest.fixture(scope="module")
def repository() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ignore-") as folder:
        git(Path(folder), "init", "-q")
        yield Path(folder)


def lay_out(root: Path, files: list[str], ignores: dict[str, list[str]]) -> None:
    """The files that can be there together, in an otherwise empty work tree."""
    for entry in root.iterdir():
        if entry.name != ".git":
            entry.unlink() if entry.is_symlink() or not entry.is_dir() else shutil.rmtree(entry)
    for name, text in [*((f, "") for f in files), *((f"{d}/.gitignore", "\n".join(t)) for d, t in ignores.items())]:
        target = root / name.lstrip("/")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, newline="")
        except OSError:
            continue  # a file stands where a directory would be, or the other way round


@examples(20)
@given(files=st.lists(path, min_size=1, max_size=12), ignores=ignore_files)
@example(files=["foo/foo1", "a"], ignores={"": ["foo*", "!foo/"]})
@example(files=["a/b/x", "a/c/x"], ignores={"": ["a/**/x"], "a": ["!b/x"]})
def test_exactly_the_files_that_git_lists_are_uploaded(
    repository: Path, files: list[str], ignores: dict[str, list[str]]
) -> None:
    lay_out(repository, files, ignores)
    assert shipped(repository) == listed_by_git(repository)


def test_the_ignore_files_above_the_directory_count_up_to_the_top_of_the_work_tree(repository: Path) -> None:
    lay_out(
        repository,
        ["src/a/x.log", "src/a/keep.log", "src/a/main.py", "src/b/main.py"],
        {"": ["*.log"], "src": ["!keep.log", "/a/main.py"]},
    )
    assert shipped(repository / "src" / "a") == listed_by_git(repository / "src" / "a") == ["keep.log"]
    assert shipped(repository / "src" / "b") == ["main.py"]


def test_git_directories_are_never_uploaded_nested_clones_included(repository: Path) -> None:
    lay_out(repository, ["vendor/lib/code.py"], {})
    git(repository / "vendor" / "lib", "init", "-q")
    assert shipped(repository) == ["vendor/lib/code.py"]


def test_links_are_entries_of_their_own_and_are_not_followed(repository: Path) -> None:
    lay_out(repository, ["data/x"], {})
    (repository / "link").symlink_to("data")
    (repository / "nowhere").symlink_to("gone")
    assert shipped(repository) == listed_by_git(repository) == ["data/x", "link", "nowhere"]


def test_tracked_files_are_uploaded_even_if_ignored_and_deleted_ones_are_not(repository: Path) -> None:
    lay_out(repository, ["model.bin", "gone.py", "main.py"], {"": ["*.bin"]})
    git(repository, "add", "--force", ".")
    (repository / "gone.py").unlink()
    try:
        assert shipped(repository) == [".gitignore", "main.py", "model.bin"]
    finally:
        git(repository, "rm", "-r", "-q", "--cached", ".")


def test_the_environment_of_a_git_hook_selects_no_other_repository(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_out(repository, ["main.py"], {})
    monkeypatch.setenv("GIT_DIR", str(tmp_path))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "index"))
    assert shipped(repository) == ["main.py"]


@pytest.mark.parametrize(
    "ignores",
    [
        {"": ["*.log", "build/", "/b.txt"]},
        {"": ["*", "!*/", "!*.py"]},
        {"": ["build/"], "build": ["!a"]},
        {"": ["**/a", "# a comment", "", "b.txt"], "ab": ["!a"]},
        {"": ["a/**/x y"], "a": ["*.txt", "!b.txt"]},
        {"": [".env", "\\#c", "[ab]"]},
    ],
)
def test_without_git_the_ignore_files_are_read_here(
    repository: Path, ignores: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ["a.py", "b.txt", "x.log", "build/a", "build/b.txt", "ab/a", "ab/b/a", "a/b/x y", "a/b.txt", ".env", "#c"]
    lay_out(repository, files, ignores)
    expected = listed_by_git(repository)
    monkeypatch.setattr(archive, "_listed_by_git", lambda root: None)
    assert shipped(repository) == expected


def test_outside_a_work_tree_the_ignore_files_are_read_here(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("*.bin\n")
    (tmp_path / "model.bin").touch()
    (tmp_path / "main.py").touch()
    assert shipped(tmp_path) == [".gitignore", "main.py"]
