"""AWS EC2 as a kind of backend: its driver, words, quotas, health and connection test. boto3 is imported by what calls
AWS, not here: whatever only reads offers saves its memory."""

from __future__ import annotations

import datetime as dt
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from functools import cached_property
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.utils import timezone
from django.utils.translation import gettext as _, gettext_lazy

from dstackweb.backends.aws import (
    config as aws_config,
    instance_types,
    instances,
    offers,
    public_url,
    quotas,
    rate_limits,
)
from dstackweb.backends.contract import (
    Cloud,
    CloudInstance,
    Hidden,
    InstanceOrder,
    Offer,
    OfferPart,
    Quota,
    SourceFailed,
    SourceFailure,
    SourceKey,
    SourceReading,
    SourceSpec,
)
from dstackweb.backends.kinds import ApiUsage, ConnectionReport, HealthLine, Kind, QuotaFamily
from dstackweb.lib.errors import DomainError
from dstackweb.lib.sql import parsed_uid
from dstackweb.spec.effective import Requirements

if TYPE_CHECKING:
    from dstackweb.backends.aws.client import Aws
    from dstackweb.backends.forms import BackendForm
    from dstackweb.backends.models import Backend

HOUR_S = 3600.0
ACCOUNT = ("credentials", "endpoint_url")
CHOICE = ("families", "instance_types")
"""Settings that sources depend on."""


class AwsBackend(Cloud):
    """One account. All calls wait for their turn in the rate limits that all processes share (docs/aws.md)."""

    sources: Mapping[str, SourceSpec] = {
        "instance_types": SourceSpec(
            12 * HOUR_S,
            dict[str, instance_types.InstanceType],
            ACCOUNT,
            (*CHOICE, "architectures"),
            tells=OfferPart.SHAPE,
        ),
        "prices": SourceSpec(
            12 * HOUR_S, dict[str, Decimal], ACCOUNT, CHOICE, hides=Hidden.ON_DEMAND, tells=OfferPart.PRICE
        ),
        "spot_prices": SourceSpec(
            300.0, dict[str, dict[str, Decimal]], ACCOUNT, CHOICE, hides=Hidden.SPOT, tells=OfferPart.PRICE
        ),
        "quotas": SourceSpec(HOUR_S, dict[str, int], ACCOUNT, hides=Hidden.NONE),
        "quota_use": SourceSpec(600.0, dict[str, int], ACCOUNT, hides=Hidden.NONE),
        "subnets": SourceSpec(
            12 * HOUR_S, dict[str, str], (*ACCOUNT, "subnets"), hides=Hidden.NONE, tells=OfferPart.SHAPE
        ),
    }

    limits, use = "quotas", "quota_use"

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    @cached_property
    def config(self) -> aws_config.AwsConfig:
        """The settings. Raises Invalid."""
        return aws_config.read(self.backend.config)

    def wanted(self) -> list[SourceKey]:
        return [
            SourceKey(source, region)
            for region in self.config.regions
            for source in self.sources
            if source != "subnets" or self.config.subnets_in(region)
        ]

    def fetch(self, key: SourceKey) -> Any:
        """Read a source from AWS: a mapping. Raises SourceFailed."""
        with self._connect(key.region) as aws:
            match key.source:
                case "instance_types":
                    return instance_types.fetch(aws, self.config, key.region)
                case "prices":
                    return instance_types.fetch_prices(aws, self.config, key.region)
                case "spot_prices":
                    return instance_types.fetch_spot_prices(aws, self.config, key.region, timezone.now())
                case self.limits:
                    return quotas.limits(aws, key.region)
                case self.use:
                    return quotas.use_by_others(aws, key.region, self._own_orders)
                case "subnets":
                    return instance_types.fetch_subnets(aws, self.config, key.region)
        raise LookupError(f"AWS has no source {key.source!r}")

    def join(
        self, readings: Mapping[SourceKey, SourceReading], requirements: Requirements, *, image: str | None = None
    ) -> list[Offer]:
        """The offers, cheapest first. Raises SourceFailed if nothing is known."""
        allowed = self.config.allow_private_url
        problem = public_url.find_problem(settings.DSTACKWEB_PUBLIC_URL, allow_private=allowed)
        name, own_use = self.backend.name, self._own_use()
        return offers.join(self.config, readings, requirements, own_use, backend=name, image=image, url_problem=problem)

    def quotas(self, readings: Mapping[SourceKey, SourceReading], region: str) -> Mapping[str, Quota]:
        return offers.Region(self.config, readings, region, self._own_use()[region]).quotas

    def _own_use(self) -> Mapping[str, Counter[str]]:
        """The vCPUs of own instances by region and quota."""
        used: defaultdict[str, Counter[str]] = defaultdict(Counter)
        using = self.backend.instances_in_use()
        for region, name, spot, cpus in using.values_list("region", "instance_type", "is_spot", "cpus"):
            if (code := quotas.code_of(name, spot=spot)) is not None:
                used[region][code] += cpus
        return used

    def _own_orders(self, orders: Iterable[str]) -> set[str]:
        ids = {uid for order in orders if (uid := parsed_uid(order)) is not None}
        return {str(uid) for uid in self.backend.instances.filter(pk__in=ids).values_list("pk", flat=True)}

    def launch(self, order: InstanceOrder) -> CloudInstance:
        with self._connect(order.region) as aws:
            return instances.launch(aws, self.config, order)

    def instances(self, region: str, deployment: str) -> list[CloudInstance]:
        with self._connect(region) as aws:
            return list(instances.tagged(aws, region, {instances.DEPLOYMENT_TAG: deployment}))

    def terminate(self, region: str, cloud_ids: Sequence[str]) -> None:
        with self._connect(region) as aws:
            instances.terminate(aws, region, cloud_ids)

    def regions(self) -> tuple[str, ...]:
        """The configured regions. Raises Invalid."""
        return self.config.regions

    @contextmanager
    def _connect(self, region: str) -> Iterator[Aws]:
        """The client for this backend; it signs in again after bad credentials. Raises SourceFailed."""
        from dstackweb.backends.aws import client

        try:
            aws = client.aws_of(self.backend)
        except DomainError as error:
            raise SourceFailed(SourceFailure.BAD_CREDENTIALS, why="config", region=region, text=error.detail) from error
        try:
            yield aws
        except SourceFailed as failed:
            if failed.code in (SourceFailure.BAD_CREDENTIALS, SourceFailure.NO_CREDENTIALS):
                client.forget(self.backend)
            raise


class AwsKind(Kind):
    """One AWS account per backend."""

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
        from dstackweb.backends.forms import schema_form

        return schema_form(self, AwsForm)

    def location(self, config: Mapping[str, Any]) -> str:
        return ", ".join(config["regions"])

    def runs_images(self, config: Mapping[str, Any]) -> bool:
        return bool(config.get("containers", True))

    def source_failure(self, error: Mapping[str, Any]) -> str:
        data = {"region": "", "text": "", "action": "", "who": "", **error}
        match error.get("code"):
            case SourceFailure.ACCESS_DENIED:
                text = _("Access denied in %(region)s: the policy lacks %(action)s.")
                if data["who"]:
                    text = _("Access denied in %(region)s: the policy of %(who)s lacks %(action)s.")
                return text % data + " " + _("Allow it in IAM.")
            case SourceFailure.NO_CREDENTIALS:
                return _(
                    "No AWS credentials found. Set them for the backend, or give the server boto3's variables, a "
                    "profile or an instance role."
                )
            case SourceFailure.REGION_DISABLED:
                if error.get("sure", True):
                    text = _("Region %(region)s is not enabled in this account.")
                else:  # AWS answers the same to wrong keys
                    text = _("Region %(region)s seems not enabled: AWS rejects the credentials there.")
                return text % data + " " + _("Enable it, or remove it from the backend.")
            case SourceFailure.BAD_CREDENTIALS:
                known = {
                    "expired": _("The AWS credentials have expired. Sign in again, or set new ones."),
                    "clock": _("AWS rejects requests because this server's clock is wrong. Set the clock."),
                    "config": _("The AWS credentials cannot be read: %(text)s"),
                }
                rejected = _("AWS rejected the credentials: %(text)s Set an active access key and its secret.")
                return known.get(str(error.get("why")), rejected) % data
        return super().source_failure(error)

    def offer_detail(self, detail: Mapping[str, Any]) -> str:
        match detail:
            case {"code": "quota_unknown", "why": "not_documented"}:
                return _("Quota unknown: AWS does not document the quota of this family.")
            case {"code": "quota_unknown", "why": "not_listed"}:
                return _("Quota unknown: not listed by Service Quotas.")
            case {"code": "quota_use_unknown", "limit": limit, "needs": needs}:
                text = _("Use of the quota unknown: %(limit)d vCPUs in all, %(needs)d needed.")
                return text % {"limit": limit, "needs": needs}
            case {"code": "no_quota", "used": None, "limit": limit, "needs": needs}:
                return _("No quota: %(limit)d vCPUs in all, %(needs)d needed.") % {"limit": limit, "needs": needs}
            case {"code": "subnets_unknown"}:
                return _("Zones of the configured subnets unknown.")
            case {"code": "not_in_zone", "offered_in": offered, "zones": zones}:
                shown = {"offered": ", ".join(offered), "zones": ", ".join(zones) or "–"}
                return _("Available in %(offered)s, but the configured subnets are in %(zones)s.") % shown
            case {"code": "image_not_supported"}:
                return _("Its instances run no containers: `containers` is off.")
            case {"code": "no_driver"}:
                text = _("No public AWS image has a driver for the GPUs of %(family)s. Set `ami` to one that has.")
                return text % detail
            case {"code": "public_url", "why": "missing"}:
                return _("Set DSTACKWEB_PUBLIC_URL so that instances can reach this server.")
            case {"code": "public_url", "why": "not_https"}:
                return _("DSTACKWEB_PUBLIC_URL must be an https:// URL.")
            case {"code": "public_url", "why": "private"}:
                return _("DSTACKWEB_PUBLIC_URL is private. Set a public one, so that instances can reach this server.")
        return super().offer_detail(detail)

    def quota_families(self) -> Sequence[QuotaFamily]:
        shown = (group for group in quotas.GROUPS if group.label)
        return [QuotaFamily(_(group.label), group.on_demand or "", group.spot or "") for group in shown]

    def quota_name(self, code: str) -> str:
        return quotas.NAMES.get(code, code)

    def test_connection(self, config: Mapping[str, Any], secret: str) -> ConnectionReport:
        # boto3 and its memory come with the first test.
        from dstackweb.backends.aws import check, check_words

        read = aws_config.read(config)
        key_id = read.credentials.access_key_id
        plain = aws_config.secret_of(key_id, secret) if key_id else ""
        return check_words.report(check.check(read, plain, settings.DSTACKWEB_PUBLIC_URL))

    def health(self, backends: Sequence[Backend], now: dt.datetime) -> Iterable[HealthLine]:
        for backend in backends:
            allowed = bool(backend.config.get("allow_private_url"))
            if why := public_url.find_problem(settings.DSTACKWEB_PUBLIC_URL, allow_private=allowed):
                hint = self.offer_detail({"code": "public_url", "why": why})
                yield HealthLine(_("Backend %s") % backend.name, "bad", _("starts no instances"), hint)

    def api_usage(self, now: dt.datetime) -> list[ApiUsage]:
        return rate_limits.api_usage(now)
