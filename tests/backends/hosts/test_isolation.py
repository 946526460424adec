"""Who a machine's jobs run as, and where their directories lie."""

from __future__ import annotations

import pwd
from pathlib import Path

import pytest

from dstackweb.backends.models import Isolation
from dstackweb.runner.isolation import arrange, can_traverse, make_runs_dir, prepare, runs_dir


@pytest.fixture
def nobody() -> pwd.struct_passwd:
    return pwd.getpwnam("nobody")


def test_root_runs_jobs_as_another_user(open_home: Path) -> None:
    made = arrange(open_home, uid=0, job_user="nobody", shared_uid=False)
    assert (made.isolation, made.job_user, made.error) == (Isolation.USER, "nobody", "")


def test_root_prefers_another_user_even_where_sharing_is_allowed(open_home: Path) -> None:
    assert arrange(open_home, uid=0, job_user="nobody", shared_uid=True).isolation == Isolation.USER


@pytest.mark.parametrize(
    ("job_user", "why"), [("no-such-user-here", "there is no user"), ("root", "is root, which no job may be")]
)
def test_root_with_an_unfit_job_user_refuses_jobs_and_names_the_setting(
    open_home: Path, job_user: str, why: str
) -> None:
    made = arrange(open_home, uid=0, job_user=job_user, shared_uid=False)
    assert made.isolation == Isolation.NONE
    assert why in made.error
    assert "DSTACKWEB_JOB_USER" in made.error


def test_without_root_jobs_are_refused_unless_sharing_is_allowed(open_home: Path) -> None:
    refusing = arrange(open_home, uid=1000, job_user="nobody", shared_uid=False)
    assert refusing.isolation == Isolation.NONE
    assert "DSTACKWEB_SHARED_UID" in refusing.error
    sharing = arrange(open_home, uid=1000, job_user="nobody", shared_uid=True)
    assert (sharing.isolation, sharing.job_user, sharing.error) == (Isolation.SHARED, "", "")


def test_runs_lie_in_the_home_when_the_jobs_user_can_get_there(open_home: Path, nobody: pwd.struct_passwd) -> None:
    assert runs_dir(open_home, nobody) == open_home / "runs"


def test_runs_lie_under_var_lib_when_it_cannot_and_always_at_the_same_place(
    open_home: Path, nobody: pwd.struct_passwd
) -> None:
    home = open_home / "closed/home"
    home.mkdir(parents=True)
    home.parent.chmod(0o700)
    place = runs_dir(home, nobody)
    assert place == runs_dir(home, nobody)
    assert place.parent.parent == Path("/var/lib")
    assert place.parent.name.startswith("dstackweb-")
    assert runs_dir(home, None) == home / "runs"


def test_each_home_has_its_own_place(open_home: Path, nobody: pwd.struct_passwd) -> None:
    closed = open_home / "closed"
    for name in ("one", "two"):
        (closed / name).mkdir(parents=True)
    closed.chmod(0o700)
    assert runs_dir(closed / "one", nobody) != runs_dir(closed / "two", nobody)


@pytest.mark.parametrize(
    ("mode", "uid_matches", "gid_matches", "enters"),
    [
        (0o700, True, False, True),
        (0o700, False, True, False),
        (0o710, False, True, True),
        (0o701, False, False, True),
        (0o701, False, True, False),
        (0o071, True, True, False),
    ],
)
def test_the_first_class_of_mode_bits_that_applies_decides(
    open_home: Path, mode: int, uid_matches: bool, gid_matches: bool, enters: bool
) -> None:
    folder = open_home / "folder"
    folder.mkdir()
    folder.chmod(mode)
    info = folder.stat()
    uid = info.st_uid if uid_matches else info.st_uid + 4711
    gids = [info.st_gid] if gid_matches else [info.st_gid + 4711]
    assert can_traverse(folder, uid, gids) is enters


def test_other_users_pass_through_the_runs_directory_and_see_nothing_in_it(open_home: Path) -> None:
    place = open_home / "dstackweb-0/runs"
    make_runs_dir(place)
    make_runs_dir(place)
    assert [folder.stat().st_mode & 0o777 for folder in (place, place.parent)] == [0o711, 0o711]


def test_without_a_usable_runs_directory_jobs_are_refused_with_a_reason(open_home: Path) -> None:
    (open_home / "file").write_text("in the way")
    made = arrange(open_home / "file", uid=1000, job_user="nobody", shared_uid=True)
    found = prepare(made)
    assert found.isolation == Isolation.NONE
    assert "can't be made" in found.error
