"""People: how they sign in, their second step, and single sign-on."""

from __future__ import annotations

import datetime as dt
from typing import Any

from dstackweb.settings.environment import (
    DSTACKWEB_OIDC_CLIENT_ID,
    DSTACKWEB_OIDC_CLIENT_SECRET,
    DSTACKWEB_OIDC_NAME,
    DSTACKWEB_OIDC_SCOPES,
    DSTACKWEB_OIDC_URL,
)

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
AXES_ENABLE_ADMIN = False  # accounts.admin has its own
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
