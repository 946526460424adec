"""The product's settings on the side under test, in a folder of their own.

`DSTACKWEB_TEST_SIDE=sqlite` (the default) is SQLite with the database cache and the ORM broker; `postgres` is
PostgreSQL with Redis. The first process that loads this starts what its side needs; pytest-xdist's workers find it
in the environment they inherit.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

from tests import servers

if "DSTACKWEB_TEST_HOME" not in os.environ:
    for name in [name for name in os.environ if name.startswith(("DSTACKWEB_", "Q_CLUSTER"))]:
        if not name.startswith("DSTACKWEB_TEST_"):
            del os.environ[name]
    _home = Path(tempfile.mkdtemp(prefix="dstackweb-tests-"))
    _home.chmod(0o755)  # jobs in tests run as another user
    atexit.register(shutil.rmtree, _home, ignore_errors=True)
    os.environ["DSTACKWEB_TEST_HOME"] = str(_home)
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):  # tests start hundreds of processes: they compile all of it once
        os.environ["PYTHONPYCACHEPREFIX"] = str(_home / "bytecode")
    os.environ.pop("DATABASE_URL", None)
    os.environ.pop("REDIS_URL", None)
    if os.environ.get("DSTACKWEB_TEST_SIDE") == "postgres":
        os.environ["DATABASE_URL"] = servers.postgres(_home / "postgres").url
        os.environ["REDIS_URL"] = servers.redis(_home / "redis").url

_worker = os.environ.get("PYTEST_XDIST_WORKER", "")
os.environ["DSTACKWEB_HOME"] = f"{os.environ['DSTACKWEB_TEST_HOME']}/{_worker or 'main'}"
if _worker and "REDIS_URL" in os.environ:
    os.environ["REDIS_URL"] = os.environ["REDIS_URL"].rsplit("/", 1)[0] + f"/{int(_worker[2:]) + 1}"

from dstackweb.settings import *  # noqa: E402, F403  # after the environment; all of them
from dstackweb.settings import DATABASES, DSTACKWEB_HOME, INSTALLED_APPS  # noqa: E402  # after the environment

# A file, not memory: threads and processes of a test see the same rows.
DATABASES["default"]["TEST"] = {
    "NAME": f"test_{_worker or 'main'}" if "DATABASE_URL" in os.environ else str(DSTACKWEB_HOME / "test.sqlite3")
}
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
if (_sso := "allauth.socialaccount.providers.openid_connect") not in INSTALLED_APPS:
    INSTALLED_APPS.append(_sso)  # for tests of single sign-on, which set the rest
DSTACKWEB_METRICS_TOKEN = "of-the-tests-scraper"
STATIC_ROOT = f"{os.environ['DSTACKWEB_TEST_HOME']}/static"  # collected for tests in the browser
WHITENOISE_AUTOREFRESH = True  # found when asked for: each test client otherwise lists all files
