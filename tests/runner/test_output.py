"""Output on its way from the commands to the API: whole, masked, limited."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, strategies as st

from dstackweb.runner import output
from dstackweb.runner.client import Client, Refused, Unreachable
from dstackweb.runner.masking import Masker
from dstackweb.runner.output import Shipper
from dstackweb.runner.spool import CUT, missing_line
from tests.runner.conftest import Box
from tests.runner.test_masking import SECRETS, TEXTS, mask_slowly
from tests.support import eventually, examples

MakeBox = Callable[..., Box]
WORK = "while [ ! -e enough ]; do sleep 0.02; done"
LIMIT, HEAD = 100_000, 75_000
FLOOD = "head -c 6000000 /dev/zero | tr '\\0' x"


@pytest.mark.parametrize("reachable", [True, False], ids=["with the API there", "with the API away"])
def test_a_flood_loses_its_middle_and_never_fills_the_disk(box: MakeBox, reachable: bool) -> None:
    job = box("echo up", WORK, FLOOD, "touch flooded", WORK.replace("enough", "seen"), "echo the end", log_limit=LIMIT)
    job.launch()
    job.wait_for("up")
    job.api.trouble = lambda what: None if reachable else 503
    (job.run_dir / "enough").touch()
    eventually((job.run_dir / "flooded").exists)
    assert (job.state / "spool").stat().st_size == HEAD
    job.api.trouble = lambda what: None
    shown = b"up\n" + b"x" * (HEAD - 3) + CUT
    eventually(lambda: job.nudge() and job.api.log == shown)
    (job.run_dir / "seen").touch()
    end = job.end()
    missing = end["log_missing"]
    kept = 3 + 6_000_000 - HEAD - missing
    assert LIMIT // 8 <= kept + len(b"the end\n") <= LIMIT // 4
    assert job.api.log == shown + missing_line(missing) + b"x" * kept + b"the end\n"
    assert (end["reason"], end["log_size"]) == ("done_by_runner", len(job.api.log))


def test_a_log_of_just_its_limit_is_whole(box: MakeBox) -> None:
    job = box("printf 12345678", log_limit=8)
    job.launch()
    job.end()
    assert job.api.log == b"12345678"


def test_a_job_whose_log_is_cut_goes_on_and_says_how_much_there_was(box: MakeBox) -> None:
    job = box("echo up", WORK, "printf 1234567", "sleep 0.01", "exit 3")
    job.launch()
    job.wait_for("up")
    job.api.keeps = 5
    (job.run_dir / "enough").touch()
    end = job.end()
    assert job.api.log == b"up\n12"
    assert (end["exit_code"], end["log_size"], end["log_missing"]) == (3, 10, 0)


def test_a_secret_never_leaves_the_machine_even_split_over_two_reads(box: MakeBox) -> None:
    job = box("printf 'pass=hunt'", WORK, "printf 'er2;'", "printf 'hun'", env={"PASS": "hunter2"}, redact=["hunter2"])
    job.launch()
    eventually(lambda: bytes(job.api.log) == b"pass=")
    (job.run_dir / "enough").touch()
    job.end()
    assert job.api.log == b"pass=*******;hun"


def test_a_secret_is_masked_across_the_pieces_that_are_sent(box: MakeBox) -> None:
    before = output.CHUNK - 4
    job = box(f"head -c {before} /dev/zero | tr '\\0' x; echo hunter2; echo done", redact=["hunter2"])
    job.launch()
    job.end()
    assert job.api.log == b"x" * before + b"*******\ndone\n"


def test_commands_may_reopen_their_output(box: MakeBox) -> None:
    """`> /dev/stderr` empties a file, and is refused to all but its owner."""
    job = box("for i in $(seq 30); do echo $i; echo $i > /dev/stderr; echo $i | tee /dev/stdout; done")
    job.launch()
    assert job.end()["exit_code"] == 0
    assert sorted(job.lines(), key=int) == [str(number) for number in range(1, 31) for _ in range(4)]


def test_the_output_process_exits_with_the_last_writer(box: MakeBox) -> None:
    """Neither the runner's end nor a stop of the job takes it away before."""
    job = box("echo up; trap 'sleep 0.3; echo down; exit 0' TERM", "while :; do sleep 0.02; done")
    job.launch()
    job.wait_for("up")
    job.kill()
    spool = str(job.state / "spool")
    assert not output.is_done(spool)
    shell = min(job.processes())
    os.kill(shell, signal.SIGTERM)
    eventually(lambda: output.is_done(spool))
    assert Path(spool).read_bytes().endswith(b"down\n")
    job.launch()
    assert job.end()["log_size"] == len(job.api.log)


class Log(Client):
    """The API's side of a log, with answers that get lost and data that comes in part or was lost since."""

    def __init__(self, draw: Callable[[st.SearchStrategy[str]], str]) -> None:
        self.data = b""
        self.draw = draw

    def post_bytes(self, path: str, data: bytes) -> dict[str, int]:
        offset = int(path.rpartition("=")[2])
        fault = self.draw(st.sampled_from(["", "", "", "no answer", "lost answer", "half", "rolled back"]))
        if fault == "no answer":
            raise Unreachable(fault)
        if fault == "rolled back":
            self.data = self.data[: len(self.data) // 2]
        if offset > len(self.data):
            raise Refused(409, {"detail": "a gap", "expected": len(self.data)})
        new = data[len(self.data) - offset :]
        self.data += new[: len(new) // 2] if fault == "half" else new
        if fault == "lost answer":
            raise Unreachable(fault)
        return {"next": len(self.data)}


@pytest.fixture(scope="module")
def spool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("job") / "spool"


@examples(60)
@given(data=st.data(), writes=st.lists(TEXTS, max_size=8), secrets=SECRETS, chunk=st.integers(1, 20))
def test_through_any_fault_the_log_is_the_spool_masked(
    spool: Path,
    data: st.DataObject,
    writes: list[bytes],
    secrets: list[bytes],
    chunk: int,
) -> None:
    """Successors in the middle, pieces of any size, lost answers, a log that lost its end: it makes no difference."""
    spool.write_bytes(b"")
    api = Log(data.draw)

    def ship(sender: Shipper, final: bool) -> bool:
        try:
            return sender.ship(final)
        except Unreachable:
            return True

    with mock.patch.object(output, "CHUNK", chunk):
        sender = Shipper(api, str(spool), Masker(secrets))
        for written in writes:
            with spool.open("ab") as file:
                file.write(written)
            for _ in range(data.draw(st.integers(0, 3))):
                ship(sender, final=False)
            if data.draw(st.booleans()):
                sender = Shipper(api, str(spool), Masker(secrets))
        while ship(sender, final=True) or sender.offset != len(api.data):
            if sender.offset != len(api.data):
                sender.offset = None
    assert api.data == mask_slowly(b"".join(writes), secrets)
