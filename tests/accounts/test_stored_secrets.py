"""What lets someone in is stored in no form in which it is sent: a copy of the database lets nobody in."""

from __future__ import annotations

import pytest
from allauth.mfa.recovery_codes.internal.auth import RecoveryCodes
from allauth.mfa.totp.internal.auth import TOTP, generate_totp_secret
from django.apps import apps
from django.conf import settings
from django.test import Client

from dstackweb.accounts import services
from dstackweb.backends.hosts import joining
from dstackweb.lib.secrets import decrypt
from dstackweb.notifications import channels
from dstackweb.notifications.models import ChannelKind
from tests.factories import make_project, make_user

pytestmark = pytest.mark.django_db


def test_no_row_has_what_lets_someone_in() -> None:
    ada, project = make_user("ada", password="correct horse battery", is_superuser=True), make_project("main")
    client, totp = Client(), generate_totp_secret()
    client.force_login(ada)
    TOTP.activate(ada, totp)
    recovery = RecoveryCodes.activate(ada).get_unused_codes()
    channel = channels.create(ada, ChannelKind.WEBHOOK, "hook", "https://example.org/hooks/unguessable")
    services.set_secret(project, "HF_TOKEN", "hf_abcdefghij", by=ada)
    secrets = {
        "password": "correct horse battery",
        "session": client.cookies[settings.SESSION_COOKIE_NAME].value,
        "API token": services.create_token(ada, "laptop")[1],
        "invite": services.invite(project, ada, "member")[1],
        "sign-in link": services.make_login_link(ada),
        "host's invite": joining.invite(ada)[1],
        "app's secret": totp,
        "recovery code": recovery[0],
        "webhook": "unguessable",
        "webhook's key": decrypt(channel.key),
        "project's secret": "hf_abcdefghij",
    }
    rows = [str(row) for model in apps.get_models() for row in model._base_manager.values()]
    assert len(rows) > len(secrets)
    assert [name for name, secret in secrets.items() if any(secret in row for row in rows)] == []
