"""AWS EC2 as a kind of backend: what the rest of the server may know of it."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from dstackweb.backends.aws import config as aws_config
from dstackweb.backends.aws import public_url, rate_limits, wording
from dstackweb.backends.aws.backend import AwsBackend
from dstackweb.backends.kinds import ApiUsage, ConnectionReport, HealthCheck, Kind, QuotaFamily

if TYPE_CHECKING:
    from dstackweb.backends.admin.forms import BackendForm
    from dstackweb.backends.models import Backend


class AwsKind(Kind):
    """One account. boto3 is imported by what asks AWS, not here."""

    name = "aws"
    label = "AWS EC2"
    driver_class = AwsBackend
    schema = aws_config.AwsConfig
    can_test = True
    setup_hint = gettext_lazy(
        "An AWS account whose EC2 instances runs may use. Choose regions and how to sign in, then test the connection."
    )

    def settle(self, config: Mapping[str, Any], stored: str = "") -> tuple[dict[str, Any], str]:
        return aws_config.settle(config, stored)

    def form(self) -> type[BackendForm]:
        from dstackweb.backends.aws.admin_form import AwsForm

        return AwsForm

    def location(self, config: Mapping[str, Any]) -> str:
        regions = config.get("regions") or "–"
        return regions if isinstance(regions, str) else ", ".join(regions)

    def source_failure(self, error: Mapping[str, Any]) -> str:
        return wording.failure(error)

    def offer_detail(self, detail: Mapping[str, Any]) -> str:
        return wording.availability(detail)

    def quota_families(self) -> Sequence[QuotaFamily]:
        return wording.quota_families()

    def quota_name(self, code: str) -> str:
        return wording.QUOTA_NAMES.get(code, code)

    def test_connection(self, config: Mapping[str, Any], secret: str) -> ConnectionReport:
        # boto3 and its memory come with the first test.
        from dstackweb.backends.aws import check, check_words

        read = aws_config.read(config)
        key_id = read.credentials.access_key_id
        plain = aws_config.secret_of(key_id, secret) if key_id else ""
        return check_words.report(check.check(read, plain, settings.DSTACKWEB_PUBLIC_URL))

    def health(self, backends: Sequence[Backend], now: dt.datetime) -> Iterable[HealthCheck]:
        for backend in backends:
            allowed = bool(backend.config.get("allow_private_url"))
            if why := public_url.find_problem(settings.DSTACKWEB_PUBLIC_URL, allow_private=allowed):
                hint = wording.availability({"code": "public_url", "why": why})
                yield HealthCheck(_("Backend %s") % backend.name, "bad", _("starts no instances"), hint)

    def api_usage(self, now: dt.datetime) -> list[ApiUsage]:
        return rate_limits.api_usage(now)
