from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from dstackweb.runner.orders import parse_orders, parse_spec
from dstackweb.runner.state import State
from tests.support import REPO


def state(tmp_path: Path) -> State:
    made = State(str(tmp_path / "a" / "b"))
    made.make()
    return made


def test_the_nonce_is_made_once(tmp_path: Path) -> None:
    first = state(tmp_path).nonce()
    assert len(first) == 32
    assert state(tmp_path).nonce() == first


def test_the_folder_is_closed_to_others_also_when_it_was_open(tmp_path: Path) -> None:
    Path(state(tmp_path).folder).chmod(0o755)
    assert Path(state(tmp_path).folder).stat().st_mode & 0o777 == 0o700


def test_only_one_process_has_the_lock(tmp_path: Path) -> None:
    held = state(tmp_path)
    assert held.lock()
    script = f"from dstackweb.runner.state import State; print(State({held.folder!r}).lock())"
    other = subprocess.run([sys.executable, "-S", "-c", script], cwd=REPO, capture_output=True, text=True, check=True)
    assert other.stdout == "False\n"


def test_a_mere_look_at_the_lock_is_waited_out(tmp_path: Path) -> None:
    wanted = state(tmp_path)
    Path(wanted.path("lock")).touch()
    look = (
        "import fcntl, sys, time; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_SH); print('', flush=True); time.sleep(0.2)"
    )
    with subprocess.Popen([sys.executable, "-S", "-c", look, wanted.path("lock")], stdout=subprocess.PIPE) as looking:
        assert looking.stdout is not None
        looking.stdout.readline()
        assert wanted.lock()
    with Path(wanted.path("lock")).open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'"x"', b'{"api": "http://127.0.0.1", "job": 7}'])
def test_orders_that_make_no_sense_are_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_orders(raw)


def test_a_spec_takes_defaults_for_null_and_ignores_what_a_newer_api_adds() -> None:
    spec = parse_spec({"commands": ["true"], "shell": None, "max_duration_s": None, "new": 1})
    assert (spec.shell, spec.max_duration_s, spec.env) == ("/bin/sh", None, {})
