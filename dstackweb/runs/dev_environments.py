"""What runs in a dev environment."""

from __future__ import annotations

from dstackweb.runner.exec_target import IDE_SOCKET
from dstackweb.spec.codes import Ide
from dstackweb.spec.effective import EffectiveSpec
from dstackweb.spec.units import MAX_DURATION_S

WAIT = f"""\
trap 'exit 0' TERM
echo "Ready: dstackweb ssh $DSTACK_RUN_NAME"
exec 2>/dev/null
sleep {MAX_DURATION_S} & wait $! || :"""
"""One sleep, not a loop: a shell that starts another one after TERM would leave it behind."""

JUPYTER = f"""\
if ! command -v jupyter-lab >/dev/null 2>&1; then
  echo "JupyterLab is not installed here: add it to the image or the host's set-up, or install it in \\`init\\`" >&2
  exit 127
fi
folder=$PWD
cd "$DSTACK_RUN_DIR" && rm -f {IDE_SOCKET}
exec jupyter-lab --no-browser --ServerApp.root_dir="$folder" --ServerApp.sock={IDE_SOCKET} \\
  --ServerApp.sock_mode=0600 --IdentityProvider.token= --ServerApp.allow_remote_access=True --allow-root"""
"""On a socket in the run's directory, which only the job's user can open; the gateway asks who connects."""


def commands(spec: EffectiveSpec) -> list[str]:
    """What a dev environment runs: its `init`, then what people work with."""
    return [*(spec.init or ()), JUPYTER if spec.ide == Ide.JUPYTER else WAIT]
