"""Jobs in a sandbox of bubblewrap: they see no other processes, have a /tmp of their own, and can't change the system.

`bwrap` starts as root, because many systems forbid users to make namespaces. `setpriv` then becomes the job's user
without any capability, before the first of the job's commands.
"""

from __future__ import annotations

import glob
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import PurePath

DEVICES = ("/dev/nvidia*", "/dev/dri", "/dev/kfd", "/dev/infiniband")
"""What jobs get of /dev, if it is there, beside its usual files: GPUs and fast networks."""
TMP = ("/tmp", "/var/tmp")
TMP_BELOW = ("/tmp/", "/var/tmp/")
TRIAL_S = 10.0


def wrapped(
    argv: Sequence[str], account: pwd.struct_passwd, *, run_dir: str, working_dir: str, writable: Sequence[str] = ()
) -> list[str]:
    """The command that root runs to run `argv` in a sandbox as `account`, in a folder that it must be able to enter.

    It can change `run_dir`, its /tmp (`make_tmp`), and those folders of `writable` that exist, as far as its user may.
    """
    own = [(tmp_of(run_dir), folder) for folder in TMP]
    folders = [(folder, folder) for folder in (*writable, run_dir)]
    in_tmp = [str(above) for folder in (*writable, run_dir) for above in reversed(PurePath(folder).parents)]
    return [
        "bwrap", "--unshare-pid", "--unshare-ipc", "--chdir", "/", "--ro-bind", "/", "/", "--proc", "/proc",
        "--dev", "/dev", "--perms", "1777", "--tmpfs", "/dev/shm",
        *_each("--dev-bind-try", [(path, path) for pattern in DEVICES for path in sorted(glob.glob(pattern))]),
        *_each("--bind", own),
        *_each("--perms", [("0755", "--dir", above) for above in in_tmp if above.startswith(TMP_BELOW)]),
        *_each("--bind-try", folders),
        "--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP",
        "--", "setpriv", "--reuid", str(account.pw_uid), "--regid", str(account.pw_gid), "--clear-groups",
        "--inh-caps=-all", "--ambient-caps=-all", "--bounding-set=-all",
        "env", f"--chdir={working_dir}", *argv,
    ]  # fmt: skip


def _each(option: str, arguments: Iterable[tuple[str, ...]]) -> list[str]:
    return [word for one in arguments for word in (option, *one)]


def obstacle(account: pwd.struct_passwd) -> str:
    """Why this machine can't run jobs in a sandbox, as found by trying; empty if it can."""
    if missing := [program for program in ("bwrap", "setpriv") if shutil.which(program) is None]:
        return f"{' and '.join(missing)} not found: install bubblewrap and util-linux"
    try:
        with tempfile.TemporaryDirectory() as folder:
            run_dir = os.path.join(folder, "run")
            os.mkdir(run_dir)
            make_tmp(run_dir, account)
            argv = wrapped(["true"], account, run_dir=run_dir, working_dir="/")
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=TRIAL_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return f"bwrap can't be started: {error}"
    if done.returncode == 0:
        return ""
    return done.stderr.decode(errors="replace").strip()[-300:] or f"bwrap failed with {done.returncode}"


def tmp_of(run_dir: str) -> str:
    """The folder that a job in a sandbox sees as its /tmp."""
    return f"{run_dir}.tmp"


def make_tmp(run_dir: str, account: pwd.struct_passwd) -> None:
    """Make it empty, for its user alone. Raises OSError."""
    remove_tmp(run_dir)
    os.mkdir(tmp_of(run_dir), 0o700)
    os.chown(tmp_of(run_dir), account.pw_uid, account.pw_gid, follow_symlinks=False)


def remove_tmp(run_dir: str) -> None:
    """Remove it, if the job had one."""
    shutil.rmtree(tmp_of(run_dir), ignore_errors=True)
