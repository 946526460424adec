"""Django's settings: the site here, and how people sign in; what deployments set, and where data are, beside it."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit

import django_stubs_ext
from csp.constants import NONE, SELF
from django.utils.translation import gettext

from dstackweb import env
from dstackweb.lib import language
from dstackweb.settings.databases import *  # noqa: F403  # Django reads them all from this module
from dstackweb.settings.environment import *  # noqa: F403  # likewise
from dstackweb.settings.environment import (
    ASSETS_DIR,
    DSTACKWEB_ALLOWED_HOSTS,
    DSTACKWEB_HOST,
    DSTACKWEB_HOST_NAME,
    DSTACKWEB_LOG_FORMAT,
    DSTACKWEB_OIDC_CLIENT_ID,
    DSTACKWEB_OIDC_CLIENT_SECRET,
    DSTACKWEB_OIDC_NAME,
    DSTACKWEB_OIDC_SCOPES,
    DSTACKWEB_OIDC_URL,
    DSTACKWEB_PORT,
    DSTACKWEB_PUBLIC_URL,
    DSTACKWEB_SESSION_HOURS,
    DSTACKWEB_STATIC_ROOT,
    url_host,
)

# Makes ModelAdmin[Run] and QuerySet[Run] work at run time too.
django_stubs_ext.monkeypatch()

INSTALLED_APPS = [
    "dstackweb.web.admin.AdminApp",
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
PROGRAM_PATHS = ("/api/", "/healthz", "/readyz", "/metrics")
"""Beginnings of addresses that answer programs, which send a token."""
MIDDLEWARE = [
    "dstackweb.api.app.without_cookies",
    "django.middleware.security.SecurityMiddleware",
    "dstackweb.web.common.views.CompressedPages",
    "dstackweb.web.common.views.PagePolicy",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.locale.LocaleMiddleware",
    "django.middleware.common.CommonMiddleware",
    "dstackweb.web.common.views.readable_pages",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "dstackweb.accounts.preferences.middleware",
    "dstackweb.accounts.sessions.middleware",
    "allauth.account.middleware.AccountMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "django_htmx.middleware.HtmxMiddleware",
    "dstackweb.audit.recorder.middleware",
    "dstackweb.api.app.version_header",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [ASSETS_DIR / "templates"],
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


def _origin(url: str) -> list[str]:
    return ["{0.scheme}://{0.netloc}".format(urlsplit(url))] if url else []


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
SECURE_REDIRECT_EXEMPT = [f"^{path.removeprefix('/')}" for path in PROGRAM_PATHS]
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
        "form-action": [SELF, *_origin(DSTACKWEB_OIDC_URL)],
        "frame-ancestors": [NONE],
    }
}

_mailer = env.mailer("DSTACKWEB_EMAIL_URL")
DSTACKWEB_EMAIL_URL = _mailer.url
EMAIL_HOST, EMAIL_PORT = _mailer.host, _mailer.port
EMAIL_HOST_USER, EMAIL_HOST_PASSWORD = _mailer.user, _mailer.password
EMAIL_USE_SSL, EMAIL_USE_TLS = _mailer.tls_at_once, _mailer.starttls
DEFAULT_FROM_EMAIL = _mailer.sender
EMAIL_TIMEOUT = 5
"""Seconds of each step: all of them together must fit into a worker's claim (`notifications.sending`)."""

# Bodies in memory: run files and log chunks. Archives are read as a stream.
DATA_UPLOAD_MAX_MEMORY_SIZE = 4 * 1024 * 1024
DATA_UPLOAD_MAX_NUMBER_FIELDS = 2000

STATIC_URL = "static/"
STATIC_ROOT = os.path.abspath(DSTACKWEB_STATIC_ROOT) if DSTACKWEB_STATIC_ROOT else None
STATICFILES_DIRS = [ASSETS_DIR / "static"]
STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "staticfiles": {
        "BACKEND": "dstackweb.lib.static_files.HashedStorage"
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
language.use(gettext)
LANGUAGE_CODE = "en"
LANGUAGES = [("en", "English"), ("zh-hans", "简体中文")]
LOCALE_PATHS = [ASSETS_DIR / "locale"]
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
        "httpx": {"level": "WARNING"},
    },
}

AUTH_USER_MODEL = "accounts.User"
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": f"django.contrib.auth.password_validation.{name}"}
    for name in ("UserAttributeSimilarityValidator", "MinimumLengthValidator", "CommonPasswordValidator")
]
LOGIN_URL = "login"
LOGIN_REDIRECT_URL = "/"
LOGOUT_REDIRECT_URL = "login"

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
