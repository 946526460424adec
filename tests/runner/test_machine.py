"""What an agent finds out about its machine."""

from __future__ import annotations

import ast
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dstackweb import runner
from dstackweb.runner import machine
from dstackweb.runner.machine import Metadata
from dstackweb.runner.nvml import Sample, Snapshot

AT = "2026-11-21T12:00:00Z"


class Service:
    """Instance metadata, version 2: each answer needs a token that is still good."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.notice: bytes | None = None
        service = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                service.tokens.append(f"token-{len(service.tokens)}")
                self._send(200, service.tokens[-1].encode())

            def do_GET(self) -> None:
                if self.headers["X-aws-ec2-metadata-token"] not in service.tokens[-1:]:
                    self._send(401, b"")
                elif service.notice is None or self.path != "/latest/meta-data/spot/instance-action":
                    self._send(404, b"")
                else:
                    self._send(200, service.notice)

            def _send(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Quiet."""

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/"
        self.metadata = Metadata(self.url)


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    yield service
    service.server.shutdown()
    service.server.server_close()


def test_an_interruption_notice_is_found_once_it_appears(service: Service) -> None:
    assert service.metadata.interruption() is None
    service.notice = json.dumps({"action": "terminate", "time": AT}).encode()
    assert service.metadata.interruption() == AT
    assert len(service.tokens) == 1


def test_a_token_that_has_run_out_is_replaced(service: Service) -> None:
    service.notice = json.dumps({"action": "stop", "time": AT}).encode()
    service.metadata.interruption()
    service.tokens.append("somebody else's")
    assert service.metadata.interruption() is None
    assert service.metadata.interruption() == AT


@pytest.mark.parametrize("notice", [b"", b"[]", b"{}", b'{"time": 5}', b'{"time": "soon"}', b"\xff", b"null"])
def test_a_malformed_interruption_notice_is_ignored(service: Service, notice: bytes) -> None:
    service.notice = notice
    assert service.metadata.interruption() is None


def test_a_machine_without_metadata_is_not_interrupted() -> None:
    assert Metadata("http://127.0.0.1:9").interruption() is None


def smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr(machine.time, "sleep", lambda seconds: None)


def test_gpus_on_the_bus_are_waited_for_until_the_driver_shows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi(tmp_path, monkeypatch, f"[ -e {tmp_path}/up ] && echo GPU-1 && echo GPU-2; touch {tmp_path}/up")
    monkeypatch.setattr(machine, "_on_bus", lambda: 2)
    assert machine.gpus() == ["GPU-1", "GPU-2"]


@pytest.mark.parametrize("script", ["exit 9", "echo NVIDIA-SMI has failed", "echo No devices were found"])
def test_without_a_driver_there_are_none_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    smi(tmp_path, monkeypatch, script)
    monkeypatch.setattr(machine, "_on_bus", lambda: 2)
    monkeypatch.setattr(machine, "DRIVER_WAIT_S", 0.2)
    assert machine.gpus() == []


@pytest.mark.parametrize(
    ("named", "found"),
    [
        ("1", ["GPU-2"]), ("1,0", ["GPU-2", "GPU-1"]), ("GPU-9, MIG-3", ["GPU-9", "MIG-3"]), ("", []), ("7", []),
        ("NoDevFiles", []),
    ],
)  # fmt: skip
def test_the_gpus_of_an_allocation_are_those_that_its_cluster_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, found: list[str]
) -> None:
    smi(tmp_path, monkeypatch, "echo GPU-1; echo GPU-2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert machine.granted_gpus() == found


def test_gpus_are_found_without_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    parts = (Sample("GPU-1", 0, "A100", 40960), Sample("MIG-1", 1, "A100", 5120), Sample("GPU-2", 2, "A100", 40960))
    monkeypatch.setattr(machine.nvml, "read", lambda: Snapshot(parts))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert machine.granted_gpus() == ["GPU-2"]


def test_gpus_on_the_bus_are_nvidias_displays_and_accelerators(tmp_path: Path) -> None:
    for number, (vendor, kind) in enumerate(
        [("0x10de", "0x030200"), ("0x10de", "0x030000"), ("0x10de", "0x040300"), ("0x1d0f", "0x030000")]
    ):
        device = tmp_path / f"0000:00:0{number}.0"
        device.mkdir()
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{kind}\n")
    (tmp_path / "broken").mkdir()
    assert machine._on_bus(str(tmp_path)) == 2
    assert machine._on_bus(str(tmp_path / "nowhere")) == 0


def test_the_address_of_a_machine_is_the_one_it_reaches_the_api_from() -> None:
    assert machine.address("http://127.0.0.1:8000") == "127.0.0.1"
    assert machine.address("https://no-such-name.invalid") == ""


def test_all_of_it_is_python_3_9() -> None:
    for source in Path(runner.__file__).parent.glob("*.py"):
        ast.parse(source.read_text(), feature_version=(3, 9))


def test_a_machine_that_only_has_halt_is_powered_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A halted instance of EC2 costs on: it stays up with its processor stopped."""
    halt = tmp_path / "halt"
    halt.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/said\n')
    halt.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.switch_off()
    assert (tmp_path / "said").read_text() == "-p\n"
