"""Images that were pulled with a password are for the projects that have one."""

from __future__ import annotations

import stat
from pathlib import Path

from dstackweb.runner.images import ImageAccess

NAME, TAGGED, DIGEST = "reg.example/team/tool", "reg.example/team/tool:2", "reg.example/team/tool@sha256:" + "d" * 64
ONE, TWO = "sha256:" + "a" * 64, "sha256:" + "b" * 64


def users(access: ImageAccess, image: str = NAME, image_id: str = ONE) -> list[int]:
    return [project for project in (7, 8, 9) if access.allows(image, image_id, project)]


def test_an_image_that_came_with_a_password_is_for_the_projects_whose_password_was_taken(tmp_path: Path) -> None:
    access = ImageAccess(str(tmp_path))
    assert users(access) == [7, 8, 9], "it was never pulled here, or by an admin"
    access.note(NAME, ONE, 7, with_credentials=True, was_there=False)
    assert users(access) == users(access, TAGGED) == [7]
    access.note(TAGGED, ONE, 8, with_credentials=True, was_there=True)
    assert users(access) == users(ImageAccess(str(tmp_path))) == [7, 8]
    assert users(access, NAME, TWO) == users(access, "tool") == users(access, DIGEST) == [7, 8, 9]
    [place] = (tmp_path / "images").iterdir()
    assert stat.S_IMODE(place.stat().st_mode) == 0o700


def test_an_image_that_anybody_can_pull_is_for_all(tmp_path: Path) -> None:
    access = ImageAccess(str(tmp_path))
    access.note(DIGEST, ONE, 7, with_credentials=True, was_there=False)
    access.note(DIGEST, ONE, 8, with_credentials=False, was_there=True)
    assert users(access) == [7], "no registry was asked"
    access.note(NAME, ONE, 8, with_credentials=False, was_there=True)
    assert users(access) == [7, 8, 9]


def test_nobody_takes_an_image_from_others_by_pulling_it_with_a_password(tmp_path: Path) -> None:
    access = ImageAccess(str(tmp_path))
    access.note(NAME, ONE, 7, with_credentials=True, was_there=True)
    access.note("other.example/mine:1", ONE, 7, with_credentials=True, was_there=False)
    assert users(access) == [7, 8, 9]
