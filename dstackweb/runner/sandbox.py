"""Jobs in a sandbox of bubblewrap: they see no other processes, have a /tmp of their own, and can't change the system.

`bwrap` starts as root, because many systems forbid users to make namespaces. In the sandbox `enter` then becomes the
job's user, without any capability, and the job's shell.
"""

from __future__ import annotations

import contextlib
import glob
import os
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import PurePath

from dstackweb.runner import disk, enter
from dstackweb.runner.state import PROGRAM, say

DEVICES = ("/dev/nvidia*", "/dev/dri", "/dev/kfd", "/dev/infiniband")
"""What jobs get of /dev, if it is there, beside its usual files: GPUs and fast networks."""
GPU = re.compile(r"/dev/nvidia(\d+)")
DRIVER = "/proc/driver/nvidia/gpus/*/information"
"""What NVIDIA's driver says of each GPU, in lines such as `GPU UUID: GPU-8f6d…` and `Device Minor: 0`."""
TMP = ("/tmp", "/var/tmp")
TMP_BELOW = ("/tmp/", "/var/tmp/")
TRIAL_S = 10.0
ENV = {"PATH": os.defpath, "LANG": "C.UTF-8"}
"""Of what runs as root. Nothing of the job's: variables make programs load code."""
ENTER = "import sys; sys.path.insert(0, sys.argv[1]); from dstackweb.runner.enter import main; main(int(sys.argv[2]))"
ENTERS_WITH = ("CAP_SETUID", "CAP_SETGID", "CAP_DAC_READ_SEARCH")


def wrapped(
    orders: int, *, run_dir: str, writable: Sequence[str] = (), gpus: Collection[str] = (), users: int | None = None
) -> list[str]:
    """The command that root runs, with an environment of its own, to start what `orders` say (`enter.stored`).

    It can change `run_dir`, its /tmp (`make_tmp`), and those folders of `writable` that exist, as far as its user may.
    Of other runs, in the folder two above, it sees nothing: its user may read those of its project. Of NVIDIA's GPUs it
    has those in `gpus`, by UUID. `users` is a descriptor of what it sees as /etc/passwd.
    Raises FileNotFoundError without bwrap.
    """
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise FileNotFoundError("bwrap is not installed")
    # The runner is started with -S: `sys.prefix` is then not that of a virtual environment.
    environment = str(PurePath(sys.executable).parents[1])
    program = [path for path in (PROGRAM, environment, sys.base_prefix) if path.startswith(TMP_BELOW)]
    own = os.path.realpath(run_dir)
    run = os.path.dirname(own)
    above = [str(parent) for path in (*program, *writable, own) for parent in reversed(PurePath(path).parents)]
    return [
        bwrap, "--unshare-pid", "--unshare-ipc", "--chdir", "/", "--ro-bind", "/", "/", "--proc", "/proc",
        "--dev", "/dev", "--perms", "1777", "--tmpfs", "/dev/shm",
        *_each("--dev-bind-try", [(path, path) for path in _devices(gpus)]),
        *_each("--bind", [(os.path.join(tmp_of(run_dir), "tmp"), folder) for folder in TMP]),
        *_each("--perms", [("0755", "--dir", parent) for parent in above if parent.startswith(TMP_BELOW)]),
        *_each("--ro-bind", [(path, path) for path in program]),
        *([] if users is None else ["--perms", "0644", "--ro-bind-data", str(users), "/etc/passwd"]),
        *_each("--bind-try", [(folder, folder) for folder in writable]),
        *_each("--perms", [("0755", "--tmpfs", os.path.dirname(run)), ("0755", "--dir", run)]), "--bind", own, own,
        "--cap-drop", "ALL", *_each("--cap-add", [(right,) for right in ENTERS_WITH]), "--",
        sys.executable, "-I", "-S", "-c", ENTER, PROGRAM, str(orders),
    ]  # fmt: skip


def settled(writable: Sequence[str], ids: Collection[int]) -> list[str]:
    """Return the real paths of folders that no user of jobs (`ids`) could have replaced by a link for root to follow.

    Missing folders are left out, and so are those inside another one, which come with it.
    """
    found = []
    for folder in writable:
        real = os.path.realpath(folder)
        with contextlib.suppress(OSError):
            if (open_to_jobs := disk.loose("/", folder, ids) or disk.loose("/", real, ids)) is None:
                found.append(real)
            else:
                say(f"{folder} can't be changed by jobs in a sandbox, since others of them can change {open_to_jobs}")
    return [folder for folder in found if not any(folder.startswith(f"{other}/") for other in found)]


def users_with(account: pwd.struct_passwd, home: str) -> int:
    """A descriptor of the machine's /etc/passwd with the job's user, in memory alone.

    A project's user has no entry, without which sftp, VS Code and others refuse to run.
    """
    line = f"{account.pw_name}:x:{account.pw_uid}:{account.pw_gid}::{home}:/bin/sh\n"
    others = ""
    with contextlib.suppress(OSError), open("/etc/passwd", encoding="utf-8", errors="surrogateescape") as file:
        others = "".join(one for one in file if one.split(":")[2:3] != [str(account.pw_uid)])
    return enter.in_memory("passwd", others + line)


def _devices(gpus: Collection[str]) -> list[str]:
    """Without those that the driver names as GPUs that the job doesn't have; with all for a part of one (MIG)."""
    paths = [path for pattern in DEVICES for path in sorted(glob.glob(pattern))]
    if not all(uuid.startswith("GPU-") for uuid in gpus):
        return paths
    others = {minor for uuid, minor in _driver_names() if uuid not in gpus}
    numbers = {path: int(found[1]) for path in paths if (found := GPU.fullmatch(path))}
    return [path for path in paths if path not in numbers or (gpus and numbers[path] not in others)]


def _driver_names() -> Iterator[tuple[str, int]]:
    """UUID and number of each GPU. The driver knows no UUID of one that nothing has used since the machine started."""
    for path in glob.glob(DRIVER):
        with contextlib.suppress(OSError, ValueError, KeyError), open(path, encoding="ascii", errors="replace") as file:
            said = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in file)}
            if "?" not in said["GPU UUID"]:
                yield said["GPU UUID"], int(said["Device Minor"])


def _each(option: str, arguments: Iterable[tuple[str, ...]]) -> list[str]:
    return [word for one in arguments for word in (option, *one)]


def obstacle(account: pwd.struct_passwd) -> str:
    """Why this machine can't run jobs in a sandbox, as found by trying; empty if it can."""
    if shutil.which("bwrap") is None:
        return "bwrap not found: install bubblewrap"
    asked = {"uid": account.pw_uid, "gid": account.pw_gid, "working_dir": "/", "env": {}, "argv": ["/bin/true"]}
    number = enter.stored(asked)
    try:
        with tempfile.TemporaryDirectory() as folder:
            run_dir = os.path.join(folder, "run", "node-0")
            os.makedirs(run_dir)
            make_tmp(run_dir)
            done = subprocess.run(
                wrapped(number, run_dir=run_dir), env=ENV, pass_fds=[number], stdin=subprocess.DEVNULL,
                capture_output=True, timeout=TRIAL_S, check=False,
            )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        return f"bwrap can't be started: {error}"
    finally:
        os.close(number)
    if done.returncode == 0:
        return ""
    return done.stderr.decode(errors="replace").strip()[-300:] or f"bwrap failed with {done.returncode}"


def tmp_of(run_dir: str) -> str:
    """The folder, closed to other users, with the one that a job in a sandbox sees as its /tmp."""
    return f"{run_dir}.tmp"


def make_tmp(run_dir: str) -> None:
    """Make it empty. Raises OSError.

    It is root's, with the sticky bit, as /tmp is elsewhere: `bwrap` makes folders in it for what lies below /tmp, such
    as the program that root starts, and the job must not be able to put others in their place.
    """
    remove_tmp(run_dir)
    os.mkdir(tmp_of(run_dir), 0o700)
    tmp = os.path.join(tmp_of(run_dir), "tmp")
    os.mkdir(tmp)
    os.chmod(tmp, 0o1777)  # noqa: S103  # in a folder that is closed to all


def remove_tmp(run_dir: str) -> None:
    disk.remove(tmp_of(run_dir), say)
