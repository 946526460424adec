"""What deployments set by environment variables, which the typed readers of `env` parse.

docs/settings.md describes each variable; a test compares it with this file.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from dstackweb import env
from dstackweb.lib.network import HOST_NAME, HOST_NAME_TEXT, is_loopback, machine_name
from dstackweb.runner.isolation import PROJECT_UIDS
from dstackweb.runner.machine import usable_cpus

_package = Path(__file__).resolve().parents[1]
# A checkout has templates, static files, catalogues and examples beside the package; setup.py puts them into a wheel's.
IS_CHECKOUT = not (_package / "assets").is_dir()
ASSETS_DIR = _package.parent if IS_CHECKOUT else _package / "assets"

env.load_file()
DSTACKWEB_HOME = env.path("DSTACKWEB_HOME", ASSETS_DIR / "var" if IS_CHECKOUT else Path("var")).absolute()
DSTACKWEB_HOST = env.text("DSTACKWEB_HOST", "127.0.0.1")
DSTACKWEB_PORT = env.integer("DSTACKWEB_PORT", 8000, least=1, most=65535)
# The gateway, by which people reach their dev environments: its port of HTTP and that of SSH. 0: none.
DSTACKWEB_GATEWAY_PORT = env.integer(
    "DSTACKWEB_GATEWAY_PORT", DSTACKWEB_PORT + 1 if DSTACKWEB_PORT < 65535 else 65534, least=0, most=65535
)
DSTACKWEB_SSH_PORT = env.integer("DSTACKWEB_SSH_PORT", 2222, least=0, most=65535)
DSTACKWEB_GATEWAY_URL = env.url("DSTACKWEB_GATEWAY_URL", "http", "https", example="https://dev.example.org")
DSTACKWEB_SSH_HOST = env.text("DSTACKWEB_SSH_HOST")
DSTACKWEB_PUBLIC_URL = env.url("DSTACKWEB_PUBLIC_URL", "http", "https", example="https://gpus.example.org")
DSTACKWEB_ALLOWED_HOSTS = env.words("DSTACKWEB_ALLOWED_HOSTS")
DSTACKWEB_TRUSTED_PROXIES = env.networks("DSTACKWEB_TRUSTED_PROXIES")
DSTACKWEB_ADMIN_PASSWORD = env.secret("DSTACKWEB_ADMIN_PASSWORD")
DSTACKWEB_ADMIN_TOKEN = env.secret("DSTACKWEB_ADMIN_TOKEN")
DSTACKWEB_METRICS_TOKEN = env.secret("DSTACKWEB_METRICS_TOKEN")
DSTACKWEB_SECRET_KEY = env.secret("DSTACKWEB_SECRET_KEY")
DSTACKWEB_SESSION_HOURS = env.integer("DSTACKWEB_SESSION_HOURS", 168, least=1, most=8760)
DSTACKWEB_TWO_STEP_FOR_ADMINS = env.boolean("DSTACKWEB_TWO_STEP_FOR_ADMINS")
DSTACKWEB_OIDC_URL = env.issuer("DSTACKWEB_OIDC_URL")
DSTACKWEB_OIDC_NAME = env.text("DSTACKWEB_OIDC_NAME", "single sign-on")
DSTACKWEB_OIDC_CLIENT_ID = env.text("DSTACKWEB_OIDC_CLIENT_ID")
DSTACKWEB_OIDC_CLIENT_SECRET = env.secret("DSTACKWEB_OIDC_CLIENT_SECRET")
DSTACKWEB_OIDC_SCOPES = env.text("DSTACKWEB_OIDC_SCOPES", "openid profile email")
DSTACKWEB_OIDC_GROUPS_CLAIM = env.text("DSTACKWEB_OIDC_GROUPS_CLAIM", "groups")
DSTACKWEB_OIDC_ROLES = env.group_roles("DSTACKWEB_OIDC_ROLES")
if DSTACKWEB_OIDC_URL and not DSTACKWEB_OIDC_CLIENT_ID:
    raise env.BadSetting("DSTACKWEB_OIDC_CLIENT_ID", "", f"the client's id at {DSTACKWEB_OIDC_URL}")
DSTACKWEB_WEB_THREADS = env.integer("DSTACKWEB_WEB_THREADS", 8, least=1, most=256)
DSTACKWEB_WEB_WORKERS = env.integer("DSTACKWEB_WEB_WORKERS", min(2, usable_cpus()), least=1, most=64)
DSTACKWEB_CLUSTER_WORKERS = env.integer("DSTACKWEB_CLUSTER_WORKERS", 2, least=1, most=256)
DSTACKWEB_STATIC_ROOT = env.text("DSTACKWEB_STATIC_ROOT")
DSTACKWEB_HOST_NAME = env.text(
    "DSTACKWEB_HOST_NAME",
    machine_name(),
    pattern=HOST_NAME,
    expected=HOST_NAME_TEXT,
)
# Each server has its own: work on a machine is for the workers there.
_control = env.text("DSTACKWEB_CLUSTER_CONTROL", f"dstackweb-{DSTACKWEB_HOST_NAME}")
DSTACKWEB_CLUSTERS = {"control": _control, "cloud": env.text("DSTACKWEB_CLUSTER_CLOUD", _control)}
DSTACKWEB_JOB_USER = env.text("DSTACKWEB_JOB_USER", PROJECT_UIDS)
DSTACKWEB_JOB_WRITABLE = env.folders("DSTACKWEB_JOB_WRITABLE")
DSTACKWEB_ENGINE = env.text("DSTACKWEB_ENGINE", pattern="docker|podman|none", expected="docker, podman or none")
DSTACKWEB_CONTAINER_NETWORK = env.text(
    "DSTACKWEB_CONTAINER_NETWORK", "host", pattern="host|bridge", expected="host or bridge"
)
DSTACKWEB_JOB_VOLUMES = env.folders("DSTACKWEB_JOB_VOLUMES")
# Jobs may share the server's user where no one else can reach the server. Other names, a proxy and single sign-on say
# that others can.
_of_urls = [urlsplit(url).hostname or "" for url in (DSTACKWEB_PUBLIC_URL, DSTACKWEB_GATEWAY_URL)]
_names = (DSTACKWEB_HOST, DSTACKWEB_SSH_HOST, *DSTACKWEB_ALLOWED_HOSTS, *_of_urls)
_is_private = all(map(is_loopback, _names)) and not DSTACKWEB_TRUSTED_PROXIES and not DSTACKWEB_OIDC_URL
DSTACKWEB_SHARED_UID = env.boolean("DSTACKWEB_SHARED_UID", _is_private)
DSTACKWEB_INSECURE_HTTP = env.boolean("DSTACKWEB_INSECURE_HTTP")
DSTACKWEB_HEARTBEAT_S = env.seconds("DSTACKWEB_HEARTBEAT_S", 5)
DSTACKWEB_LOST_AFTER_S = env.seconds("DSTACKWEB_LOST_AFTER_S", 1800)
DSTACKWEB_HOST_SILENT_S = env.seconds("DSTACKWEB_HOST_SILENT_S", 30)
DSTACKWEB_START_DEADLINE_S = env.seconds("DSTACKWEB_START_DEADLINE_S", 300)
DSTACKWEB_CLOUD_START_DEADLINE_S = env.seconds("DSTACKWEB_CLOUD_START_DEADLINE_S", 900)
DSTACKWEB_PASS_EVERY_S = env.seconds("DSTACKWEB_PASS_EVERY_S", 2)
DSTACKWEB_WATCH_EVERY_S = env.seconds("DSTACKWEB_WATCH_EVERY_S", 2)
# The shortest window of a utilization policy, a minute, then has at least three samples.
DSTACKWEB_SAMPLE_EVERY_S = env.seconds("DSTACKWEB_SAMPLE_EVERY_S", 10, least=0.1, most=20)
DSTACKWEB_OFFERS_CACHE = env.numbers(
    "DSTACKWEB_OFFERS_CACHE", least=1, most=30 * 86400, example="aws.quotas=1800,aws.entries=20"
)
DSTACKWEB_RESERVE_AFTER_S = env.seconds("DSTACKWEB_RESERVE_AFTER_S", 900)
DSTACKWEB_RESERVE_FOR_S = env.seconds("DSTACKWEB_RESERVE_FOR_S", 3600)
DSTACKWEB_TASKS_PER_S = env.integer("DSTACKWEB_TASKS_PER_S", 50_000, least=100)
DSTACKWEB_LOG_LIMIT_MB = env.integer("DSTACKWEB_LOG_LIMIT_MB", 100, least=1)
DSTACKWEB_RUN_DIRS_DAYS = env.integer("DSTACKWEB_RUN_DIRS_DAYS", 14, least=1, most=3650)
DSTACKWEB_JOB_FILES_HOURS = env.integer("DSTACKWEB_JOB_FILES_HOURS", 1, least=1, most=8760)
DSTACKWEB_RUNS_DAYS = env.integer("DSTACKWEB_RUNS_DAYS", 365, least=1, most=36500)
DSTACKWEB_LOGS_DAYS = env.integer("DSTACKWEB_LOGS_DAYS", 180, least=1, most=36500)
DSTACKWEB_ARCHIVES_DAYS = env.integer("DSTACKWEB_ARCHIVES_DAYS", 90, least=1, most=36500)
DSTACKWEB_TASKS_DAYS = env.integer("DSTACKWEB_TASKS_DAYS", 7, least=1, most=3650)
DSTACKWEB_PROGRESS_DAYS = env.integer("DSTACKWEB_PROGRESS_DAYS", 90, least=1, most=36500)
DSTACKWEB_SAMPLES_DAYS = env.integer("DSTACKWEB_SAMPLES_DAYS", 1, least=1, most=365)
DSTACKWEB_AVERAGES_DAYS = env.integer("DSTACKWEB_AVERAGES_DAYS", 30, least=1, most=3650)
DSTACKWEB_HISTORY_DAYS = env.integer("DSTACKWEB_HISTORY_DAYS", 90, least=30, most=3650)
DSTACKWEB_AUDIT_DAYS = env.integer("DSTACKWEB_AUDIT_DAYS", 730, least=1, most=36500)
DSTACKWEB_HOST_EVENTS_DAYS = env.integer("DSTACKWEB_HOST_EVENTS_DAYS", 90, least=1, most=3650)
DSTACKWEB_NOTIFICATIONS_DAYS = env.integer("DSTACKWEB_NOTIFICATIONS_DAYS", 90, least=1, most=3650)
DSTACKWEB_WEBHOOK_NETWORKS = env.networks("DSTACKWEB_WEBHOOK_NETWORKS")
DSTACKWEB_ARTIFACTS_DAYS = env.integer("DSTACKWEB_ARTIFACTS_DAYS", 90, least=1, most=36500)
DSTACKWEB_ARTIFACT_LIMIT_MB = env.integer("DSTACKWEB_ARTIFACT_LIMIT_MB", 512, least=1)
DSTACKWEB_RUN_ARTIFACTS_MB = env.integer("DSTACKWEB_RUN_ARTIFACTS_MB", 2048, least=0)
DSTACKWEB_PROJECT_ARTIFACTS_GB = env.integer("DSTACKWEB_PROJECT_ARTIFACTS_GB", 50, least=0)
DSTACKWEB_ARTIFACTS_S = env.seconds("DSTACKWEB_ARTIFACTS_S", 600)
DSTACKWEB_ARCHIVE_LIMIT_MB = env.integer("DSTACKWEB_ARCHIVE_LIMIT_MB", 64, least=1)
DSTACKWEB_PROJECT_CODE_GB = env.integer("DSTACKWEB_PROJECT_CODE_GB", 50, least=1)
DSTACKWEB_JOB_DISK_GB = env.integer("DSTACKWEB_JOB_DISK_GB", 0, least=0)
DSTACKWEB_DISK_RESERVE_GB = env.integer("DSTACKWEB_DISK_RESERVE_GB", 2, least=0)
DSTACKWEB_INODE_RESERVE_PERCENT = env.integer("DSTACKWEB_INODE_RESERVE_PERCENT", 5, least=0, most=90)
DSTACKWEB_JOB_PROCESSES = env.integer("DSTACKWEB_JOB_PROCESSES", 4096, least=64)
DSTACKWEB_PROJECT_SUBMIT_MB = env.integer("DSTACKWEB_PROJECT_SUBMIT_MB", 256, least=1)
DSTACKWEB_PROJECT_LOG_GB = env.integer("DSTACKWEB_PROJECT_LOG_GB", 50, least=1)
DATABASE_URL = env.url("DATABASE_URL", "postgres", "postgresql", "sqlite", example="postgresql://user:pw@host/name")
REDIS_URL = env.url("REDIS_URL", "redis", "rediss", "unix", example="redis://host:6379/0")
DSTACKWEB_STORAGE = env.text(
    "DSTACKWEB_STORAGE",
    pattern="database|file:///.+|s3://[^/?]+.*",
    expected="database, file:///folder or s3://bucket/prefix; not set: logs and code are in DSTACKWEB_HOME",
)
DSTACKWEB_LOG_FORMAT = env.text("DSTACKWEB_LOG_FORMAT", "text", pattern="text|json", expected="text or json")
DEBUG = env.boolean("DSTACKWEB_DEBUG")


def url_host(address: str) -> str:
    return f"[{address}]" if ":" in address else address


_any_address = DSTACKWEB_HOST in {"0.0.0.0", "::"}
_local_url = f"http://{'127.0.0.1' if _any_address else url_host(DSTACKWEB_HOST)}:{DSTACKWEB_PORT}"
DSTACKWEB_API_URL = DSTACKWEB_PUBLIC_URL or _local_url
