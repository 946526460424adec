"""A Slurm cluster of two nodes on this machine, of Debian's packages. Root only.

Its GPUs are files that no driver knows: Slurm counts them and sets CUDA_VISIBLE_DEVICES. `job_env` are variables that
its jobs get from a prolog, such as those that lead to the stand-in for NVML. With `accounting` it has a slurmdbd and a
MariaDB of its own, and its jobs have cgroups, by which Slurm measures them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from standins.processes import free_ports, until
from standins.programs import search_path

CGROUPS = Path("/sys/fs/cgroup")
TABLES = Path("/usr/share/mysql")
ACCOUNT = """\
FLUSH PRIVILEGES;
CREATE USER slurm@localhost IDENTIFIED BY '{password}';
GRANT ALL ON accounts.* TO slurm@localhost;
DELETE FROM mysql.global_priv WHERE User <> 'slurm';
"""
NODES = ("n1", "n2")
CONFIG = """
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/{tracked}
TaskPlugin=task/none
TaskProlog={folder}/prolog
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=sched_interval=1,bf_interval=1
ReturnToService=2
MessageTimeout=3
SlurmdTimeout=10
KillWait=3
CompleteWait=0
JobRequeue=0
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
PreemptExemptTime=0
MinJobAge=300
GresTypes=gpu
SlurmdParameters=config_overrides
NodeName=n1 NodeAddr=127.0.0.1 Port={n1} CPUs=4 RealMemory=4000 Gres=gpu:a100:2 State=UNKNOWN
NodeName=n2 NodeAddr=127.0.0.1 Port={n2} CPUs=4 RealMemory=4000 State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES State=UP PriorityTier=1 PreemptMode=CANCEL
PartitionName=whole Nodes=n2 State=UP OverSubscribe=EXCLUSIVE PriorityTier=1 PreemptMode=CANCEL
PartitionName=urgent Nodes=n1,n2 State=UP PriorityTier=9 PreemptMode=off
"""
ACCOUNTING = """
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={slurmdbd}
AccountingStoragePass={folder}/munge.socket
AccountingStorageTRES=gres/gpu
JobAcctGatherType=jobacct_gather/cgroup
JobAcctGatherFrequency=task=1
"""
SLURMDBD = """
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={slurmdbd}
SlurmUser=root
LogFile={folder}/slurmdbd.log
PidFile={folder}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={mariadb}
StorageUser=slurm
StoragePass={password}
StorageLoc=accounts
"""
GRES = "NodeName=n1 Name=gpu Type=a100 File=/dev/zero,/dev/full\n"
START_S = 30.0


class Slurm:
    """`env` leads Slurm's commands to the cluster. Partitions: `main`, `whole` (nodes exclusive), `urgent`."""

    def __init__(self, folder: Path, *, job_env: Mapping[str, str] | None = None, accounting: bool = False) -> None:
        self.folder, self._job_env, self._accounting = folder, job_env or {}, accounting
        self.env = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> Slurm:
        """Start it, and wait until both nodes take jobs."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o755)
        (self.folder / "state").mkdir(exist_ok=True)
        (self.folder / "munge").mkdir(mode=0o755, exist_ok=True)
        key = self.folder / "munge" / "key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        named = ("port", *NODES, "slurmdbd", "mariadb")
        ports = dict(zip(named, free_ports(len(named)), strict=True))
        name = socket.gethostname().split(".")[0]
        config = CONFIG + (ACCOUNTING if self._accounting else "")
        values = {"folder": self.folder, "host": name, "tracked": "cgroup" if self._accounting else "linuxproc"}
        (self.folder / "slurm.conf").write_text(config.format(**values, **ports))
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=autodetect\n")
        (self.folder / "gres.conf").write_text(GRES)
        prolog = self.folder / "prolog"
        prolog.write_text("#!/bin/sh\n" + "".join(f"echo export {k}={v}\n" for k, v in self._job_env.items()))
        prolog.chmod(0o755)
        own = self.folder / "munge"
        self._run(
            "munge", "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={self.folder}/munge.socket",
            f"--pid-file={own}/pid", f"--log-file={own}/log", f"--seed-file={own}/seed",
        )  # fmt: skip
        self._until((self.folder / "munge.socket").exists)
        if self._accounting:
            self._start_accounting(ports)
        self.start_controller()
        for node in NODES:
            self.start_node(node)
        self._until(lambda: set(self.command("sinfo", "-N", "-h", "-o", "%T").split()) == {"idle"})
        return self

    def _start_accounting(self, ports: Mapping[str, int]) -> None:
        data, password = self.folder / "mariadb", secrets.token_hex(16)
        data.mkdir(mode=0o700)
        server = ["mariadbd", "--no-defaults", "--user=root", f"--datadir={data}", "--innodb-log-file-size=8M"]
        # What mariadb-install-db does, which needs programs of the client: one statement a line.
        tables = "".join((TABLES / f"mysql_system_tables{part}.sql").read_text() for part in ("", "_data"))
        account = ACCOUNT.format(password=password)
        statements = f"CREATE DATABASE mysql;\nUSE mysql;\nSET @auth_root_socket=NULL;\n{tables}\n{account}"
        subprocess.run(
            [*server, "--bootstrap"], input=statements, text=True, capture_output=True, timeout=120, check=True
        )
        self._run(
            "mariadb", *server, f"--socket={self.folder}/mariadb.socket", "--bind-address=127.0.0.1",
            f"--port={ports['mariadb']}", "--innodb-lock-wait-timeout=900", "--innodb-flush-log-at-trx-commit=0",
        )  # fmt: skip
        self._until(lambda: _answers(ports["mariadb"]))
        settings = self.folder / "slurmdbd.conf"
        settings.touch(mode=0o600)
        settings.write_text(SLURMDBD.format(folder=self.folder, password=password, **ports))
        self._run("slurmdbd", "slurmdbd", "-D")
        self._until(lambda: _answers(ports["slurmdbd"]))
        self.command("sacctmgr", "--immediate", "add", "cluster", "here")

    def start_controller(self) -> None:
        self._run("slurmctld", "slurmctld", "-D")
        self._until(lambda: "UP" in self.command("scontrol", "ping"))

    def start_node(self, node: str) -> None:
        self._run(node, "slurmd", "-D", "-N", node)

    def stop_controller(self) -> None:
        """As for maintenance: it saves its state, and jobs go on."""
        process = self._processes.pop("slurmctld")
        process.terminate()
        process.wait()

    def kill(self, name: str) -> None:
        """SIGKILL to `slurmctld`, which forgets what it has not saved, or to a node's daemon."""
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def command(self, *argv: str) -> str:
        """What a command of Slurm prints."""
        env = {**os.environ, **self.env, "PATH": search_path()}
        return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=30, check=False).stdout

    def stop(self) -> None:
        """End all jobs and daemons."""
        if "slurmctld" in self._processes:
            self.command("scancel", "--signal=KILL", "--full", "--user=root")
            self.command("scancel", "--user=root")
        for process in reversed(self._processes.values()):
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pid in self._left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for made in CGROUPS.glob("*/slurm_n[12]") if self._accounting else ():
            for folder, _folders, _files in os.walk(made, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)

    def _left(self) -> Iterator[int]:
        """Jobs' own daemons, which wait for the controller to hear of their end."""
        mark = f"SLURM_CONF={self.env['SLURM_CONF']}".encode()
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name)

    def _until(self, is_so: Callable[[], bool]) -> None:
        """Wait for it. Raises RuntimeError once a daemon has ended by itself, and TimeoutError."""

        def is_so_or_never() -> bool:
            for name, process in self._processes.items():
                if process.poll() is not None:
                    *_, last = (self.folder / f"{name}.out").read_text(errors="replace").splitlines() or [""]
                    raise RuntimeError(f"Slurm's {name} does not start: {last}")
            return is_so()

        until(is_so_or_never, START_S, "Slurm does not start")

    def _run(self, name: str, program: str, *arguments: str) -> None:
        env = {**os.environ, **self.env, "PATH": search_path()}
        with (self.folder / f"{name}.out").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [program, *arguments], env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
