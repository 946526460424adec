"""Django's settings. Deployments configure them by environment variables, which the typed readers of `env` parse.

docs/settings.md describes each variable; a test compares it with this file.
"""

from __future__ import annotations

import datetime as dt
import os
import secrets
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import dj_database_url
import django_stubs_ext
from csp.constants import NONE, SELF

from dstackweb import env
from dstackweb.lib.network import HOST_NAME, HOST_NAME_TEXT, machine_name
from dstackweb.runner.isolation import PROJECT_UIDS

# Makes ModelAdmin[Run] and QuerySet[Run] work at run time too.
django_stubs_ext.monkeypatch()

BASE_DIR = Path(__file__).resolve().parent.parent

env.load_file()
DSTACKWEB_HOME = env.path("DSTACKWEB_HOME", BASE_DIR / "var")
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
DSTACKWEB_WEB_WORKERS = env.integer("DSTACKWEB_WEB_WORKERS", 1, least=1, most=64)
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
DSTACKWEB_SHARED_UID = env.boolean("DSTACKWEB_SHARED_UID")
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


def _origin(url: str) -> list[str]:
    """The origin of an address, if there is one."""
    return ["{0.scheme}://{0.netloc}".format(urlsplit(url))] if url else []


_any_address = DSTACKWEB_HOST in {"0.0.0.0", "::"}
_local_url = f"http://{'127.0.0.1' if _any_address else url_host(DSTACKWEB_HOST)}:{DSTACKWEB_PORT}"
DSTACKWEB_API_URL = DSTACKWEB_PUBLIC_URL or _local_url


def _make_home(home: Path) -> None:
    try:
        home.mkdir(mode=0o755, parents=True, exist_ok=True)
        if not os.access(home, os.W_OK | os.X_OK):
            raise PermissionError
    except OSError:
        raise env.BadSetting("DSTACKWEB_HOME", str(home), "a directory that this program can write to") from None


def _secret_key(home: Path) -> str:
    """The key in `home`, made by the first process that needs it: link() puts the complete file in place, or fails."""
    path = home / "secret_key"
    if not path.exists():
        draft = home / f".secret_key.{os.getpid()}.{secrets.token_hex(4)}"
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_urlsafe(48))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    return path.read_text().strip()


# Both sides notice a lost network within 30 s: hosts reconnect, and the database server rolls back the transactions of
# a lost host, whose locks others may wait for.
_CUT_OFF: dict[str, Any] = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,
    "options": " ".join(
        f"-c {name}={value}"
        for name, value in {
            "tcp_keepalives_idle": 10,
            "tcp_keepalives_interval": 5,
            "tcp_keepalives_count": 3,
            "tcp_user_timeout": 25_000,
            "idle_in_transaction_session_timeout": 60_000,
        }.items()
    ),
}


def _patient(redis_url: str) -> str:
    """The URL with time-outs, unless it has its own: a lost connection must not block forever."""
    parts = urlsplit(redis_url)
    given = dict(parse_qsl(parts.query))
    waits = {"socket_timeout": "10"}
    if parts.scheme != "unix":
        waits |= {"socket_connect_timeout": "5", "socket_keepalive": "true"}
    return urlunsplit(parts._replace(query=urlencode(waits | given)))


def _database(home: Path) -> dict[str, Any]:
    if DATABASE_URL and not DATABASE_URL.startswith("sqlite"):
        database: dict[str, Any] = dict(dj_database_url.parse(DATABASE_URL, conn_max_age=60, conn_health_checks=True))
        if database["ENGINE"] == "django.db.backends.postgresql":
            database["ENGINE"] = "dstackweb.lib.postgresql"
        options: dict[str, Any] = database.pop("OPTIONS", None) or {}
        options = _CUT_OFF | options
        pooled = options.pop("pgbouncer", False)
        if not isinstance(pooled, bool):
            raise env.BadSetting("DATABASE_URL", DATABASE_URL, "pgbouncer=true for a PgBouncer, or nothing")
        if pooled:  # in transaction mode: no settings of a session, and nothing outlives a transaction
            options.pop("options")
        return database | {"OPTIONS": options, "DISABLE_SERVER_SIDE_CURSORS": pooled}
    if DATABASE_URL:
        database = dict(dj_database_url.parse(DATABASE_URL))
    else:
        path = home / "db.sqlite3"
        # Other users, such as those of jobs, must not read it. SQLite gives -wal and -shm the database's mode.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        database = {"ENGINE": "django.db.backends.sqlite3", "NAME": path}
    return database | {
        "CONN_MAX_AGE": 60,
        "OPTIONS": {
            "transaction_mode": "IMMEDIATE",
            "timeout": 30,
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; PRAGMA cache_size=-16000",
        },
    }


def _cache(name: str, *, may_be_away: bool = True) -> dict[str, Any]:
    """Plain data as JSON: no pickle that a job could write is ever loaded.

    With `may_be_away` an unreachable Redis means cache misses; otherwise it raises an error.
    """
    if not REDIS_URL:
        return {"BACKEND": "dstackweb.lib.cache.RowCache", "KEY_PREFIX": name}
    return {
        "BACKEND": "django_redis.cache.RedisCache",
        "LOCATION": REDIS_URL,
        "KEY_PREFIX": f"dstackweb:{name}",
        "OPTIONS": {
            "SERIALIZER": "django_redis.serializers.json.JSONSerializer",
            "SOCKET_CONNECT_TIMEOUT": 2,
            "SOCKET_TIMEOUT": 2,
            "IGNORE_EXCEPTIONS": may_be_away,
        },
    }


_make_home(DSTACKWEB_HOME)

SECRET_KEY = DSTACKWEB_SECRET_KEY or _secret_key(DSTACKWEB_HOME)
DATABASES = {"default": _database(DSTACKWEB_HOME)}
CACHES = {"default": _cache("default"), "offers": _cache("offers", may_be_away=False)}
DJANGO_REDIS_LOG_IGNORED_EXCEPTIONS = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

# Tasks are short and repeatable, and lost ones are found again from rows. So each is delivered once and not retried;
# `retry` only limits how long the task of a killed worker stays in the ORM broker.
Q_CLUSTER: dict[str, Any] = {
    "name": "dstackweb",
    "ALT_CLUSTERS": {},  # any Q_CLUSTER_NAME works, with the same values
    "workers": DSTACKWEB_CLUSTER_WORKERS,
    "bulk": 10,
    "queue_limit": 20,
    "timeout": 60,
    "retry": 90,
    "max_attempts": 2,
    "ack_failures": True,
    "save_limit": -1,
    "poll": 0.04,
    "recycle": 5000,
    "scheduler": False,
    "catch_up": False,
    "log_level": "WARNING",
    "label": "Task queue",
}
_BROKERS = "dstackweb.scheduler.processes.brokers"
if REDIS_URL:
    Q_CLUSTER |= {"redis": _patient(REDIS_URL), "broker_class": f"{_BROKERS}.redis.RedisBroker"}
else:
    Q_CLUSTER |= {"orm": "default", "broker_class": f"{_BROKERS}.orm.OrmBroker"}


_mailer = env.mailer("DSTACKWEB_EMAIL_URL")
DSTACKWEB_EMAIL_URL = _mailer.url
EMAIL_HOST, EMAIL_PORT = _mailer.host, _mailer.port
EMAIL_HOST_USER, EMAIL_HOST_PASSWORD = _mailer.user, _mailer.password
EMAIL_USE_SSL, EMAIL_USE_TLS = _mailer.tls_at_once, _mailer.starttls
DEFAULT_FROM_EMAIL = _mailer.sender
EMAIL_TIMEOUT = 5
"""Seconds of each step: all of them together must fit into a worker's claim (`notifications.sending`)."""

INSTALLED_APPS = [
    "dstackweb.web.admin.apps.AdminApp",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.humanize",
    "django.contrib.messages",
    "whitenoise.runserver_nostatic",
    "django.contrib.staticfiles",
    "allauth",
    "allauth.account",
    "allauth.mfa",
    "allauth.socialaccount",
    # It loads an HTTP client, which is a tenth of the time in which a process starts.
    *(["allauth.socialaccount.providers.openid_connect"] if DSTACKWEB_OIDC_URL else []),
    "axes",
    "csp",
    "django_q",
    "dstackweb.lib",
    "dstackweb.accounts",
    "dstackweb.profiles",
    "dstackweb.progress",
    "dstackweb.backends",
    "dstackweb.offers",
    "dstackweb.runs",
    "dstackweb.gpus",
    "dstackweb.audit",
    "dstackweb.scheduler",
    "dstackweb.notifications",
    "dstackweb.web",
    "dstackweb.api",
    "dstackweb.gateway",
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "dstackweb.web.common.views.CompressedPages",
    "csp.middleware.CSPMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.locale.LocaleMiddleware",
    "django.middleware.common.CommonMiddleware",
    "dstackweb.web.common.views.readable_pages",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "dstackweb.accounts.languages.middleware",
    "dstackweb.accounts.sessions.middleware",
    "allauth.account.middleware.AccountMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "django_htmx.middleware.HtmxMiddleware",
    "dstackweb.audit.recorder.middleware",
    "axes.middleware.AxesMiddleware",
    "dstackweb.api.app.version_header",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]
ROOT_URLCONF = "dstackweb.urls"
WSGI_APPLICATION = "dstackweb.wsgi.application"

AUTH_USER_MODEL = "accounts.User"
AUTHENTICATION_BACKENDS = ["axes.backends.AxesStandaloneBackend", "django.contrib.auth.backends.ModelBackend"]
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": f"django.contrib.auth.password_validation.{name}"}
    for name in ("UserAttributeSimilarityValidator", "MinimumLengthValidator", "CommonPasswordValidator")
]
LOGIN_URL = "login"
LOGIN_REDIRECT_URL = "/"
LOGOUT_REDIRECT_URL = "login"
AXES_FAILURE_LIMIT = 10
AXES_COOLOFF_TIME = dt.timedelta(minutes=10)
AXES_LOCKOUT_PARAMETERS = [["username", "ip_address"]]
AXES_RESET_ON_SUCCESS = True
AXES_DISABLE_ACCESS_LOG = True
AXES_VERBOSE = False
AXES_LOCKOUT_TEMPLATE = "accounts/locked_out.html"

# Of allauth: the second step, passkeys and single sign-on. Who may have an account, wrong passwords and codes, and
# mails are this product's own (`accounts.adapters`, `accounts.attempts`).
ACCOUNT_ADAPTER = "dstackweb.accounts.adapters.AccountAdapter"
ACCOUNT_EMAIL_VERIFICATION = SOCIALACCOUNT_EMAIL_VERIFICATION = "none"
ACCOUNT_LOGIN_METHODS = {"username"}
ACCOUNT_RATE_LIMITS = False
ACCOUNT_SIGNUP_FIELDS = ["username*", "password1*"]
ACCOUNT_UNIQUE_EMAIL = False
ACCOUNT_REAUTHENTICATION_REQUIRED = True
ACCOUNT_REAUTHENTICATION_METHODS = ["password", "mfa"]
ACCOUNT_REAUTHENTICATION_TIMEOUT = 600
MFA_ADAPTER = "dstackweb.accounts.adapters.SecondStepAdapter"
MFA_SUPPORTED_TYPES = ["totp", "recovery_codes", "webauthn"]
MFA_ALLOW_UNVERIFIED_EMAIL = True
MFA_PASSKEY_LOGIN_ENABLED = True
MFA_TOTP_TOLERANCE = 1  # the code before and after, for clocks that differ
MFA_TOTP_ISSUER = "dstackweb"
MFA_RECOVERY_CODES_SHOW_ONCE = True
MFA_FORMS = {
    "authenticate": "dstackweb.web.accounts.second_step.CodeForm",
    "reauthenticate": "dstackweb.web.accounts.second_step.ConfirmCodeForm",
    "activate_totp": "dstackweb.web.accounts.second_step.ActivateForm",
    "add_webauthn": "dstackweb.web.accounts.second_step.AddPasskeyForm",
    "authenticate_webauthn": "dstackweb.web.accounts.second_step.PasskeyForm",
    "login_webauthn": "dstackweb.web.accounts.second_step.PasskeySignInForm",
    "reauthenticate_webauthn": "dstackweb.web.accounts.second_step.ConfirmPasskeyForm",
}
SOCIALACCOUNT_ADAPTER = "dstackweb.accounts.adapters.SingleSignOnAdapter"
SOCIALACCOUNT_PROVIDERS: dict[str, Any] = {"openid_connect": {"APPS": []}}
if DSTACKWEB_OIDC_URL:
    SOCIALACCOUNT_PROVIDERS["openid_connect"]["APPS"] = [
        {
            "provider_id": "sso",
            "name": DSTACKWEB_OIDC_NAME,
            "client_id": DSTACKWEB_OIDC_CLIENT_ID,
            "secret": DSTACKWEB_OIDC_CLIENT_SECRET,
            "settings": {
                "server_url": DSTACKWEB_OIDC_URL,
                "oauth_pkce_enabled": True,
                "scope": DSTACKWEB_OIDC_SCOPES.split(),
            },
        }
    ]
PASSWORD_RESET_TIMEOUT = 24 * 3600
"""Of links that set a new password, in seconds."""

_https = DSTACKWEB_PUBLIC_URL.startswith("https://")
_public_host = urlsplit(DSTACKWEB_PUBLIC_URL).hostname or ""
ALLOWED_HOSTS = DSTACKWEB_ALLOWED_HOSTS or sorted(
    {"localhost", "127.0.0.1", "[::1]", DSTACKWEB_HOST_NAME.lower(), url_host(DSTACKWEB_HOST), _public_host} - {""}
)
CSRF_TRUSTED_ORIGINS = _origin(DSTACKWEB_PUBLIC_URL)
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = _https
SESSION_COOKIE_HTTPONLY = CSRF_COOKIE_HTTPONLY = True
SESSION_COOKIE_SAMESITE = CSRF_COOKIE_SAMESITE = "Lax"
# Browsers send a host's cookies to all its ports; without the suffix two servers on one machine would share them.
_suffix = "" if _https else f"_{DSTACKWEB_PORT}"
SESSION_COOKIE_NAME, CSRF_COOKIE_NAME = f"dstackweb_session{_suffix}", f"dstackweb_csrf{_suffix}"
SESSION_ENGINE = "dstackweb.accounts.sessions"  # not in Redis: its keys are session cookies
SESSION_COOKIE_AGE = DSTACKWEB_SESSION_HOURS * 3600
SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https") if _https else None
# Pages are redirected to the public URL. Programs are not: they would have sent their token already, and probes and
# runners on this machine may use plain HTTP on loopback.
SECURE_SSL_REDIRECT, SECURE_SSL_HOST = _https, urlsplit(DSTACKWEB_PUBLIC_URL).netloc
SECURE_REDIRECT_EXEMPT = [r"^api/", r"^healthz$", r"^readyz$", r"^metrics$"]
SECURE_HSTS_SECONDS = 365 * 24 * 3600 if _https else 0
# Whether its other subdomains and browsers' preload lists take part is for the owner of the domain to say.
SILENCED_SYSTEM_CHECKS = ["security.W005", "security.W021"]
SECURE_REFERRER_POLICY = "same-origin"
X_FRAME_OPTIONS = "DENY"
CONTENT_SECURITY_POLICY = {
    "DIRECTIVES": {
        "default-src": [SELF],
        "img-src": [SELF, "data:"],  # icons in Tabler's style sheet
        "object-src": [NONE],
        "base-uri": [SELF],
        # Browsers hold redirects of a form to this, too: signing in elsewhere begins with one.
        "form-action": [
            SELF,
            *(["{0.scheme}://{0.netloc}".format(urlsplit(url)) for url in [DSTACKWEB_OIDC_URL] if url]),
        ],
        "frame-ancestors": [NONE],
    }
}

# Bodies in memory: run files and log chunks. Archives are read as a stream.
DATA_UPLOAD_MAX_MEMORY_SIZE = 4 * 1024 * 1024
DATA_UPLOAD_MAX_NUMBER_FIELDS = 2000

STATIC_URL = "static/"
STATIC_ROOT = os.path.abspath(DSTACKWEB_STATIC_ROOT) if DSTACKWEB_STATIC_ROOT else None
STATICFILES_DIRS = [BASE_DIR / "static"]
STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "staticfiles": {
        "BACKEND": "dstackweb.lib.pages.HashedStorage"
        if STATIC_ROOT
        else "django.contrib.staticfiles.storage.StaticFilesStorage"
    },
}
# Without collected files (a shell, tests, runserver) whitenoise serves them from the source directories.
WHITENOISE_USE_FINDERS = not STATIC_ROOT
WHITENOISE_MAX_AGE = 0

USE_TZ = True
TIME_ZONE = "UTC"
USE_I18N = True
LANGUAGE_CODE = "en"
LANGUAGES = [("en", "English"), ("zh-hans", "简体中文")]
LOCALE_PATHS = [BASE_DIR / "locale"]
FORMAT_MODULE_PATH = "dstackweb.lib.formats"
LANGUAGE_COOKIE_NAME = f"dstackweb_language{_suffix}"
LANGUAGE_COOKIE_AGE = 365 * 24 * 3600
LANGUAGE_COOKIE_SECURE, LANGUAGE_COOKIE_HTTPONLY, LANGUAGE_COOKIE_SAMESITE = _https, True, "Lax"

TEST_RUNNER = "django.test.runner.DiscoverRunner"
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {
        "text": {"()": "dstackweb.lib.logs.TextFormatter"},
        "json": {"()": "dstackweb.lib.logs.JsonFormatter"},
    },
    # Clients that get a 429 may repeat often: that must not fill the disk.
    "filters": {
        "not_429": {
            "()": "django.utils.log.CallbackFilter",
            "callback": lambda record: getattr(record, "status_code", 0) != 429,
        }
    },
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": DSTACKWEB_LOG_FORMAT}},
    "root": {"handlers": ["stderr"], "level": "INFO"},
    "loggers": {
        "django": {"handlers": [], "level": "INFO", "propagate": True},
        "django.request": {"filters": ["not_429"]},
        "django-q": {"level": "WARNING"},
        "axes": {"level": "WARNING"},
        "httpx": {"level": "WARNING"},
    },
}
