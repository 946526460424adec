"""What Slurm's commands print, read as data. The lines are of Slurm 22.05 and 23.11."""

from __future__ import annotations

import datetime as dt
import os
from typing import Any

import pytest
from django.utils import timezone

from dstackweb.backends import registry, services
from dstackweb.backends.clusters import EngineRefused
from dstackweb.backends.contract import (
    Availability,
    InstanceOrder,
    InstanceState,
    LaunchFailed,
    SourceFailed,
    SourceFailure,
    SourceKey,
    SourceReading,
    SourceState,
)
from dstackweb.backends.matching import meets
from dstackweb.backends.models import Backend
from dstackweb.backends.slurm import commands
from dstackweb.backends.slurm.commands import Commands
from dstackweb.backends.slurm.kind import SlurmBackend
from dstackweb.lib.errors import Invalid
from dstackweb.offers import store
from dstackweb.spec.effective import Requirements

NODES = """\
NodeName=n1 Arch=x86_64 CPUAlloc=3 CPUTot=8 Gres=gpu:a100:4(S:0-1) GresUsed=gpu:a100:1(IDX:0) \
OS=Linux 6.1.0 #1 SMP RealMemory=64000 AllocMem=4000 State=MIXED Partitions=gpu,short Reason=a b
NodeName=n2 CPUAlloc=0 CPUTot=8 Gres=gpu:a100:2,gpu:v100:2 GresUsed=gpu:a100:0(IDX:N/A),gpu:v100:2(IDX:2-3) \
RealMemory=64000 AllocMem=0 State=IDLE Partitions=gpu
NodeName=n3 CPUAlloc=0 CPUTot=8 Gres=(null) GresUsed=gpu:0 RealMemory=64000 AllocMem=0 State=IDLE+DRAIN Partitions=gpu
NodeName=n4 CPUAlloc=0 CPUTot=8 Gres=(null) RealMemory=64000 AllocMem=0 State=IDLE* Partitions=short
"""
PARTITIONS = """\
PartitionName=gpu Default=YES OverSubscribe=NO State=UP Nodes=n[1-3]
PartitionName=short OverSubscribe=EXCLUSIVE State=UP Nodes=n[1,4]
PartitionName=old OverSubscribe=NO State=DOWN Nodes=
"""
WAITING = "short,old|Resources|1|1|500M|N/A\n"
FOUND = commands.partitions(PARTITIONS, commands.nodes(NODES), commands.pending(WAITING))


def test_nodes_belong_to_their_partitions_with_what_is_used() -> None:
    gpu = FOUND["gpu"]
    assert set(gpu.nodes) == {"n1", "n2", "n3"}
    assert gpu.nodes["n1"] == commands.Node(8, 3, 64000, 4000, {"a100": 4}, {"a100": 1})
    assert gpu.nodes["n2"].gpus_used == {"a100": 0, "v100": 2}
    assert [node.usable for node in FOUND["short"].nodes.values()] == [True, False], "n4 does not answer"
    assert not gpu.nodes["n3"].usable
    assert (FOUND["short"].exclusive, FOUND["short"].waiting, gpu.waiting) == (True, 1, 0)


@pytest.mark.parametrize(
    ("size", "fits"),
    [((1, 1000, "", 0), 13), ((4, 1000, "", 0), 3), ((1, 60000, "", 0), 2), ((1, 0, "a100", 1), 5),
     ((1, 0, "a100", 3), 1), ((1, 0, "v100", 1), 0), ((6, 0, "a100", 1), 1)],
)  # fmt: skip
def test_what_fits_is_what_the_nodes_have_left(size: tuple[int, int, str, int], fits: int) -> None:
    assert sum(node.fits(*size) for node in FOUND["gpu"].nodes.values()) == fits


@pytest.mark.parametrize(
    ("line", "cpus", "memory_mib", "gpus"),
    [
        ("gpu|None|1|2|500M|gres:gpu:a100:2", (5, 0), (4500, 0), (3, 0)),
        ("gpu,short|None|1|1|2G|gres/gpu:a100:1", (3, 1), (4000, 2048), (1, 1)),
        ("gpu|None|2|12|0|N/A", (3, 6), (4000, 0), (1, 0)),
        ("gpu|None|1|99|500M|N/A", (3, 0), (4000, 0), (1, 0)),
        ("gpu|Resources|1|2|500M|gres:gpu:a100:2", (3, 0), (4000, 0), (1, 0)),
        ("", (3, 0), (4000, 0), (1, 0)),
        ("nothing|None", (3, 0), (4000, 0), (1, 0)),
    ],
)
def test_a_job_that_slurm_has_not_looked_at_has_its_room_already(
    line: str, cpus: tuple[int, int], memory_mib: tuple[int, int], gpus: tuple[int, int]
) -> None:
    """On the fullest node that has it; another reason is that of a job that waits, and has none."""
    found = commands.partitions(PARTITIONS, commands.nodes(NODES), commands.pending(line))["gpu"]
    n1, n2 = found.nodes["n1"], found.nodes["n2"]
    assert (n1.cpus_used, n2.cpus_used) == cpus
    assert (n1.memory_used_mib, n2.memory_used_mib) == memory_mib
    assert (n1.gpus_used["a100"], n2.gpus_used["a100"]) == gpus


def test_a_node_that_jobs_do_not_share_takes_one_when_it_is_empty() -> None:
    assert FOUND["gpu"].nodes["n1"].fits(1, 0, "", 0, whole=True) == 0
    assert FOUND["gpu"].nodes["n2"].fits(1, 0, "", 0, whole=True) == 1


@pytest.mark.django_db
def test_offers_are_what_a_node_needs_of_partitions_that_could_ever_give_it() -> None:
    config = {"projects": ["main"], "partitions": ["gpu", "short"], "gpu_memory": ["a100=80GB"]}
    backend, _is_new = services.put("cluster", "slurm", config)
    driver: Any = registry.driver(backend)

    def offers(**needs: Any) -> list[Any]:
        found: list[Any] = driver.join(_fresh(driver), Requirements(**needs))
        assert all(meets(offer, Requirements(cpu_min=1, memory_min_mib=1)) for offer in found)
        return found

    a100, v100, short = offers(gpu_count_min=1, cpu_min=2, memory_min_mib=8000)
    assert (a100.gpu_name, a100.gpu_memory_mib, a100.cpus, a100.memory_mib) == ("A100", 81920, 2, 8000)
    assert (a100.region, a100.instance_type, a100.detail["fits"], a100.price) == ("gpu", "gpu:a100", 4, 0), (
        "of 5 free ones, two on n1 have the CPUs"
    )
    assert {v100.availability, short.availability} == {Availability.BUSY}
    assert offers(cpu_min=9) == []
    [shown, *_] = driver.join(_fresh(driver), Requirements(), image="busybox")
    assert shown.availability is Availability.NOT_AVAILABLE
    assert offers(gpu_count_min=5) == []
    with pytest.raises(SourceFailed):
        driver.join({SourceKey("partitions", ""): SourceReading(SourceState.FAILED)}, Requirements())


def _fresh(driver: Any) -> dict[SourceKey, SourceReading]:
    value = store.checked({name: FOUND[name] for name in ("gpu", "short")}, driver.sources["partitions"].type)
    return {SourceKey("partitions", ""): SourceReading(SourceState.FRESH, value, timezone.now())}


def test_jobs_of_others_are_left_out_and_states_are_said_in_our_words() -> None:
    lines = [
        "7|u-1|RUNNING|gpu|1795466586|1795466590|n1|None|dstackweb:mine main/first",
        "8|u-2|PENDING|gpu|1795466586|N/A||Resources|dstackweb:mine main/first",
        "9|u-3|PREEMPTED|gpu|1795466586|1795466590|n1|None|dstackweb:mine main/a|b",
        "10|u-4|COMPLETING|gpu|1795466586|1795466590|n1|None|dstackweb:mine main/a",
        "11|u-5|CANCELLED|gpu|1795466586|1795466590|n1|None|dstackweb:mine main/a",
        "12|u-6|RUNNING|gpu|1795466586|1795466590|n1|None|dstackweb:theirs main/a",
        "13|train|RUNNING|gpu|1795466586|1795466590|n1|None|(null)",
        "14|a name with a line break",
        "--me|u-7|RUNNING|gpu|1795466586|1795466590|n1|None|dstackweb:mine main/a",
        "1 2|u-8|RUNNING|gpu|1795466586|1795466590|n1|None|dstackweb:mine main/a",
        "15|u-9|RUNNING|gpu|17954665869999999|99999999999999999999|n1|None|dstackweb:mine main/a",
        "",
    ]
    found = commands.jobs("\n".join(lines), "mine")
    assert [(job.instance, job.cloud_id, job.state.value, job.why) for job in found] == [
        ("u-1", "7-u-1", "running", ""), ("u-2", "8-u-2", "starting", ""), ("u-3", "9-u-3", "gone", "interrupted"),
        ("u-4", "10-u-4", "ending", "cloud"), ("u-5", "11-u-5", "gone", "cloud"), ("u-9", "15-u-9", "running", ""),
    ]  # fmt: skip
    assert found[0].launched_at == dt.datetime.fromtimestamp(1795466590, dt.UTC)
    assert found[1].launched_at == dt.datetime.fromtimestamp(1795466586, dt.UTC)
    assert found[1].state is InstanceState.STARTING
    assert [job.waits for job in found] == ["", "Resources", "", "", "", ""]


@pytest.mark.parametrize(
    ("reason", "waits"),
    [("None", ""), ("", ""), ("(Priority)", "Priority"), ("QOSMaxGRESPerUser", "QOSMaxGRESPerUser"),
     ("ReqNodeNotAvail, UnavailableNodes:n1", "ReqNodeNotAvail"), ("<b>x</b>", ""), ("A" * 90, "A" * 60)],
)  # fmt: skip
def test_why_slurm_keeps_a_job_waiting_is_a_code(reason: str, waits: str) -> None:
    [job] = commands.jobs(f"8|u-2|PENDING|gpu|1795466586|N/A||{reason}|dstackweb:mine main/first")
    assert job.waits == waits


@pytest.mark.parametrize(
    ("code", "text"),
    [("Resources", "not enough is free (Resources)"), ("QOSMaxGRESPerUser", "a limit of its QOS is reached (QOSMaxG"),
     ("AssocGrpCpuLimit", "a limit of its account or user is reached (AssocGrpCpuLimit)"),
     ("SolarEclipse", "Slurm keeps it waiting: SolarEclipse")],
)  # fmt: skip
def test_slurms_reasons_are_worded(code: str, text: str) -> None:
    assert text in registry.KINDS["slurm"].wait_reason(code)


@pytest.mark.parametrize(
    ("script", "raised"),
    [("echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1", SourceFailed),
     ("kill -9 $$", SourceFailed), ("exit 255", SourceFailed),
     ("echo 'Permission denied (publickey).' >&2; exit 255", SourceFailed),
     ("echo 'sbatch: error: Batch job submission failed: Invalid qos' >&2; exit 1", EngineRefused)],
)  # fmt: skip
def test_no_answer_is_distinguished_from_a_refusal(
    tmp_path: Any, monkeypatch: Any, script: str, raised: type[Exception]
) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(f"#!/bin/sh\n{script}\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(SourceFailed) as failed:
        Commands("login.example").run("squeue")
    assert type(failed.value) is raised


def test_a_job_gets_nothing_of_the_servers_environment_but_what_slurm_needs(monkeypatch: Any) -> None:
    monkeypatch.setenv("DSTACKWEB_SECRET_KEY", "secret")
    monkeypatch.setenv("DATABASE_URL", "postgres://secret")
    monkeypatch.setenv("SLURM_CONF", "/etc/there.conf")
    there = dict(line.split("=", 1) for line in Commands().run("env").splitlines())
    assert there["SLURM_CONF"] == "/etc/there.conf"
    assert not {"DSTACKWEB_SECRET_KEY", "DATABASE_URL"} & set(there)


def test_over_ssh_each_argument_arrives_as_one_word(tmp_path: Any, monkeypatch: Any) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nshift 2\nexec sh -c "$*"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    odd = "a b'c\"$(touch /tmp/x);`id`"
    assert Commands("slurm@login.example").run("printf", "[%s]", odd, "2") == f"[{odd}][2]"


def test_without_slurm_here_the_source_says_so(monkeypatch: Any, tmp_path: Any) -> None:
    (tmp_path / "env").symlink_to("/usr/bin/env")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SourceFailed) as failed:
        Commands().run("squeue")
    assert failed.value.code == SourceFailure.UNREACHABLE
    assert "squeue" in failed.value.data["text"]


@pytest.mark.django_db
@pytest.mark.parametrize(
    "config",
    [{"partitions": []}, {"partitions": ["a"], "ssh_host": "-oProxyCommand=x"},
     {"partitions": ["a"], "qos": "--wrap=x"}, {"partitions": ["a"], "account": "a b"},
     {"partitions": ["a"], "gpu_memory": ["a100"]},
     {"partitions": ["--uid=0"]}, {"partitions": ["a"], "projects": []}],
)  # fmt: skip
def test_settings_that_could_be_options_of_commands_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        services.put("cluster", "slurm", {"projects": ["main"], **config})


@pytest.mark.django_db
def test_a_job_gets_just_what_was_ordered_and_no_token_in_its_arguments() -> None:
    config = {"projects": ["main"], "partitions": ["gpu"], "account": "lab", "qos": "high"}
    backend, _is_new = services.put("cluster", "slurm", config)
    driver: Any = registry.driver(backend)
    arguments = driver._arguments(
        InstanceOrder("u-1", "mine", "gpu", "gpu:a100", False, "#!/bin/sh\nsecret", cpus=3, memory_mib=9000,
                      gpu_count=2, gpu_name="A100", duration_s=3601, project="main", run="first")
    )  # fmt: skip
    wanted = (
        "job-name=u-1 partition=gpu cpus-per-task=3 mem=9000M gres=gpu:a100:2 time=61 account=lab qos=high no-requeue"
    )
    assert {f"--{option}" for option in wanted.split()} <= set(arguments)
    assert "--export=ALL" in arguments
    assert "--comment=dstackweb:mine main/first" in arguments
    assert "secret" not in " ".join(arguments)


@pytest.mark.django_db
@pytest.mark.parametrize("said", ["4711", "4711;cluster", "Welcome to login-1;\n4711;cluster\nYour quota: 3 of 5"])
def test_a_jobs_number_is_read_from_what_sbatch_and_a_login_say(tmp_path: Any, monkeypatch: Any, said: str) -> None:
    assert _submitted(tmp_path, monkeypatch, said).cloud_id == "4711-u-1"


@pytest.mark.django_db
def test_a_submission_without_a_number_is_looked_for_before_the_next(tmp_path: Any, monkeypatch: Any) -> None:
    with pytest.raises(SourceFailed, match="Welcome"):
        _submitted(tmp_path, monkeypatch, "Welcome to login-1")


def _submitted(tmp_path: Any, monkeypatch: Any, said: str) -> Any:
    backend, _is_new = services.put("cluster", "slurm", {"projects": ["main"], "partitions": ["gpu"]})
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\ncat <<'E'\n{said}\nE\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    driver: Any = registry.driver(backend)
    return driver.submit(InstanceOrder("u-1", "mine", "gpu", "cpu", False, "#!/bin/sh\n", is_new=True))


@pytest.mark.django_db
def test_jobs_do_not_get_the_servers_own_user_unless_it_is_shared(
    monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    settings.DSTACKWEB_SHARED_UID = False
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    config = {"projects": ["main"], "partitions": ["gpu"]}
    backend, _is_new = services.put("cluster", "slurm", config)
    with pytest.raises(LaunchFailed, match="DSTACKWEB_SHARED_UID"):
        registry.cloud(backend).launch(InstanceOrder("u-1", "mine", "gpu", "cpu", False, ""))
    assert registry.KINDS["slurm"].test_connection(config, "").state == "failed"
    assert not SlurmBackend(Backend(config={**config, "ssh_host": "slurm@login.example"})).shares_servers_user


@pytest.mark.django_db
def test_an_instance_whose_number_slurm_gave_to_another_job_ends_nothing(tmp_path: Any, monkeypatch: Any) -> None:
    """A controller that lost its state counts from an older number."""
    backend, _is_new = services.put("cluster", "slurm", {"projects": ["main"], "partitions": ["gpu"]})
    new, old, same = "22222222-2", "11111111-1", "33333333-3"
    listed = (
        commands.JOB_HEADER
        + "\n"
        + "\n".join(
            f"{job}|{name}|RUNNING|gpu|1|2|n1|None|dstackweb:mine main/a" for job, name in ((4, new), (5, same))
        )
    )
    for name, script in (("squeue", f"cat <<'E'\n{listed}\nE"), ("scancel", f"echo $* >>{tmp_path}/ended")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    cloud = registry.cloud(backend)
    found = [one.cloud_id for one in cloud.instances("gpu", "mine")]
    assert found == [commands.cloud_id("4", new), commands.cloud_id("5", same)]
    cloud.terminate("gpu", [commands.cloud_id("4", old), commands.cloud_id("5", same)])
    assert (tmp_path / "ended").read_text() == "5\n"


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("squeue", "nodes", "partitions"),
    [("", NODES, PARTITIONS), ("<html>", NODES, PARTITIONS), ("null", NODES, PARTITIONS),
     ("PARTITION|REASON", "", PARTITIONS), ("PARTITION|REASON", "<html>", PARTITIONS),
     ("PARTITION|REASON", "NodeName=n1 CPUTot=many", PARTITIONS), ("PARTITION|REASON", NODES, "<html>")],
)  # fmt: skip
def test_what_makes_no_sense_is_a_failed_answer(
    tmp_path: Any, monkeypatch: Any, squeue: str, nodes: str, partitions: str
) -> None:
    cloud = _cluster_that_prints(tmp_path, monkeypatch, squeue, nodes, partitions)
    with pytest.raises(SourceFailed, match="nonsense"):
        cloud.fetch(SourceKey("partitions", ""))


@pytest.mark.django_db
@pytest.mark.parametrize("said", ["", "Welcome!", "<html>", "7|u-1|RUNNING|gpu|1|2|n1|None|dstackweb:mine main/a"])
def test_jobs_without_their_header_are_a_failed_answer(tmp_path: Any, monkeypatch: Any, said: str) -> None:
    cloud = _cluster_that_prints(tmp_path, monkeypatch, said)
    with pytest.raises(SourceFailed, match="nonsense"):
        cloud.instances("gpu", "mine")
    with pytest.raises(SourceFailed, match="nonsense"):
        cloud.terminate("gpu", ["7-u-1"])
    cloud = _cluster_that_prints(tmp_path, monkeypatch, f"Welcome!\n{commands.JOB_HEADER}")
    assert cloud.instances("gpu", "mine") == []


def test_a_node_that_makes_no_sense_leaves_the_others() -> None:
    assert set(commands.nodes(f"NodeName=n0 CPUTot=many\nNodeName=n9 CPUTot=-8\n{NODES}")) == {"n1", "n2", "n3", "n4"}


def _cluster_that_prints(folder: Any, monkeypatch: Any, squeue: str, nodes: str = "", partitions: str = "") -> Any:
    """A backend whose commands print this."""
    scontrol = f'case "$2" in nodes) cat <<"E"\n{nodes}\nE\n;; *) cat <<"E"\n{partitions}\nE\nesac'
    for name, script in (("squeue", f"cat <<'E'\n{squeue}\nE"), ("scontrol", scontrol)):
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    backend, _is_new = services.put("cluster", "slurm", {"projects": ["main"], "partitions": ["gpu"]})
    return registry.driver(backend)
