"""The keys of a run file that are about its container."""

from __future__ import annotations

from typing import Any

import pytest

from dstackweb.lib.errors import Invalid
from dstackweb.profiles.resolve import resolve
from dstackweb.spec.run_file import parse_run_file

IMAGE = {"type": "task", "image": "python:3.12"}
AUTH = {"username": "${{ secrets.USER }}", "password": "${{ secrets.TOKEN }}"}


def test_a_container_has_its_settings_and_the_run_shows_them() -> None:
    keys = {"entrypoint": "python -m app", "pull_policy": "always", "registry_auth": AUTH, "volumes": ["/data:/d:ro"]}
    spec = resolve(parse_run_file({**IMAGE, **keys}), None).spec
    assert {key: spec.as_file()[key] for key in keys} == keys
    assert spec.commands == ()
    assert "commands" not in spec.as_file()
    assert spec.with_secrets() == {f"registry_auth.{key}": value for key, value in AUTH.items()}


def test_images_are_pulled_when_they_are_missing_by_default() -> None:
    assert resolve(parse_run_file({**IMAGE, "commands": ["true"]}), None).spec.pull_policy == "missing"


@pytest.mark.parametrize(
    "image",
    ["python", "python:3.12", "team/tool", "localhost/a_b/c--d.e:X-1", "r.example:5000/a/b/c:1.2", "[::1]:5000/a",
     f"python@sha256:{'0f' * 32}", f"r.example/a:1@sha256:{'0f' * 32}"],
)  # fmt: skip
def test_an_image_has_a_name_that_registries_know(image: str) -> None:
    spec = resolve(parse_run_file({**IMAGE, "image": image, "commands": ["true"]}), None).spec
    assert spec.image == image


@pytest.mark.parametrize(
    ("keys", "loc", "said"),
    [
        ({"image": None, "entrypoint": "x", "commands": ["a"]}, "entrypoint", "it needs an `image`"),
        ({"image": None, "volumes": ["/a:/b"], "commands": ["a"]}, "volumes", "it needs an `image`"),
        ({"image": None}, "commands", "`commands` is missing"),
        ({"entrypoint": "x", "shell": "bash"}, "shell", "runs nothing"),
        ({"entrypoint": "--privileged x"}, "entrypoint", "begin with a program"),
        ({"entrypoint": "a 'b"}, "entrypoint", "split into words"),
        ({"image": "--privileged"}, "image", "is not valid"),
        ({"image": "docker-archive:/runs/1/planted.tar"}, "image", "is not valid"),
        ({"image": "dir:/etc"}, "image", "is not valid"),
        ({"image": "containers-storage:@0f1e"}, "image", "is not valid"),
        ({"image": "docker://python:3.12"}, "image", "is not valid"),
        ({"image": "../python"}, "image", "is not valid"),
        ({"pull_policy": "often"}, "pull_policy", "`always`, `missing` or `never`"),
        ({"registry_auth": {"username": "ada", "password": "plain"}}, "registry_auth", "could be read by all"),
        ({"registry_auth": {"username": "ada"}}, "registry_auth", "`registry_auth.password` is missing"),
        ({"registry_auth": {"username": "${{ env.X }}", "password": "${{ secrets.A }}"}}, "registry_auth", "only $"),
        ({"image": "${{ secrets.A }}"}, "image", "can't contain a secret"),
    ],
)
def test_what_a_container_cannot_have_is_refused(keys: dict[str, Any], loc: str, said: str) -> None:
    config = {key: value for key, value in {**IMAGE, **keys}.items() if value is not None}
    with pytest.raises(Invalid) as refused:
        parse_run_file(config)
    assert any(error["loc"][0] == loc and said in error["msg"] for error in refused.value.errors), refused.value.errors


@pytest.mark.parametrize(
    "volume",
    ["data:/d", "/data", "/data:d", "/:/d", "/data:/", "/a/../b:/d", "/a/./b:/d", "/data:/proc", "/data:/dev/shm",
     "/a:/b:exec", "/a:/b:", "/a,b:/d", "/a\n:/d", "--x:/d", "name:/d"],
)  # fmt: skip
def test_a_volume_names_two_plain_folders(volume: str) -> None:
    with pytest.raises(Invalid):
        parse_run_file({**IMAGE, "volumes": [volume]})
