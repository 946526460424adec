"""gunicorn, which else looks for modules in the current directory first: `python -P -m dstackweb.web_server …`."""

from __future__ import annotations

import sys

from gunicorn import util
from gunicorn.app.wsgiapp import run

if __name__ == "__main__":
    # gunicorn puts it before all other folders, unless it is one of them.
    sys.path.append(util.getcwd())
    run()
