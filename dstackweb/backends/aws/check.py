"""The connection test of an AWS backend: all its calls, with `DryRun` where they would start or change something.
Regions are tested in parallel. It waits for the network: never call it within a transaction."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from django.db import connections
from django.db.models import TextChoices
from django.utils.translation import gettext_lazy

from dstackweb.backends.aws import ami, instance_types, instances, public_url, quotas
from dstackweb.backends.aws.config import AwsConfig, in_region
from dstackweb.backends.aws.errors import aws_error
from dstackweb.backends.contract import InstanceOrder, LaunchFailed, LaunchFailure, SourceFailed, SourceFailure

if TYPE_CHECKING:
    from dstackweb.backends.aws.client import Aws

log = logging.getLogger(__name__)

LIMIT_S = 25.0
"""A person waits."""
THREADS = 12
HOME = "us-east-1"
OTHER_PARTITIONS = ("cn-", "us-gov-", "us-iso", "eu-iso", "eusc-")
NOT_SIGNED_IN = {SourceFailure.BAD_CREDENTIALS, SourceFailure.NO_CREDENTIALS, SourceFailure.UNREACHABLE}
"""Failures after which no other call would succeed."""
NO_INSTANCE = "i-00000000000000000"
MAY_BE_DONE = {"DryRunOperation", "InvalidInstanceID.NotFound"}
"""EC2's answers to a dry run that passed the permissions."""
SHOWN_QUOTAS = {"standard": ("m",), "g": ("g",), "p": ("p4", "p5")}
"""By name, families whose quotas are shown."""


class FindingState(TextChoices):
    OK = "ok", gettext_lazy("OK")
    WARNING = "warning", gettext_lazy("Warning")
    """Not confirmed, or not ideal."""
    FAILED = "failed", gettext_lazy("Failed")
    SKIPPED = "skipped", gettext_lazy("Skipped")
    """Not tried, because an earlier step failed."""


@dataclass(frozen=True)
class Finding:
    """The result of one step: a code with its numbers. `region` is empty for the account as a whole; `errors` are the
    data of SourceFailed, one per failed call."""

    step: str
    state: FindingState
    region: str = ""
    detail: Mapping[str, Any] = field(default_factory=dict)
    errors: tuple[Mapping[str, Any], ...] = ()


PERMISSIONS: Mapping[str, Sequence[tuple[str, Mapping[str, Any]]]] = {
    "instance_types": (
        ("DescribeInstanceTypes", {"key": "InstanceTypes", "MaxResults": 5}),
        ("DescribeInstanceTypeOfferings", {"key": "InstanceTypeOfferings", "MaxResults": 5}),
    ),
    "spot_prices": (
        (
            "DescribeSpotPriceHistory",
            {"key": "SpotPriceHistory", "MaxResults": 5, "ProductDescriptions": ["Linux/UNIX"]},
        ),
    ),
    "usage": (
        ("DescribeInstances", {"key": "Reservations", "MaxResults": 5}),
        ("DescribeSpotInstanceRequests", {"key": "SpotInstanceRequests", "MaxResults": 5}),
    ),
}
"""Calls of EC2 by step that only test a permission: their operations, and arguments of `Aws.call`."""


def check(config: AwsConfig, secret_access_key: str, server_url: str, *, limit_s: float = LIMIT_S) -> list[Finding]:
    """The identity, whether instances can reach this server, and then each region's findings, in order."""
    ends = time.monotonic() + limit_s
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="check")
    try:
        url = pool.submit(_reached, server_url, config.allow_private_url)
        identity, *others = _Check(config, secret_access_key, pool, ends).run()
        return [identity, *_gather([("public_url", "", url)], ends), *others]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


Step = tuple[str, str, "Future[Finding]"]


class _Check:
    def __init__(self, config: AwsConfig, secret: str, pool: ThreadPoolExecutor, ends: float) -> None:
        from dstackweb.backends.aws import client

        self.regions, self.home = config.regions, _home(config.regions)
        self.config = config.model_copy(update={"regions": (self.home, *config.regions)})
        patience = client.Patience("standard", attempts=1, connect_s=3, read_s=8, turn_s=10)
        self.aws: Aws = client.Aws(self.config, secret, patience=patience)
        self.pool, self.ends = pool, ends

    def run(self) -> list[Finding]:
        (identity,) = _gather([self._ask("identity", "", self._identity)], self.ends)
        if identity.state is FindingState.FAILED:
            return [identity, *(Finding("enabled", FindingState.SKIPPED, region) for region in self.regions)]
        (there,) = _gather([self._ask("regions", "", self._regions)], self.ends)
        steps: list[Finding | Step] = []
        for region in self.regions:
            enabled = _enabled(region, there)
            steps.append(enabled)
            if enabled.state is not FindingState.FAILED:
                steps += [self._ask(step, region, partial(ask, region)) for step, ask in self._steps(region)]
        answers = iter(_gather([one for one in steps if not isinstance(one, Finding)], self.ends))
        return [identity, *(one if isinstance(one, Finding) else next(answers) for one in steps)]

    def _steps(self, region: str) -> Iterator[tuple[str, Callable[[str], Mapping[str, Any] | Finding]]]:
        yield "instance_types", partial(self._permissions, "instance_types")
        yield "prices", self._prices
        yield "spot_prices", partial(self._permissions, "spot_prices")
        yield "quotas", self._quotas
        yield "usage", partial(self._permissions, "usage")
        if self.config.subnets_in(region):
            yield "subnets", self._subnets
        yield "image", self._image
        yield "launch", self._launch
        yield "end", self._end

    def _ask(self, step: str, region: str, ask: Callable[[], Mapping[str, Any] | Finding]) -> Step:
        return step, region, self.pool.submit(_answered, step, region, ask)

    def _identity(self) -> Mapping[str, Any]:
        answer = self.aws.call("sts", self.home, "GetCallerIdentity", key="Arn")
        return {"account": answer.get("Account", ""), "arn": answer["Arn"]}

    def _regions(self) -> Mapping[str, Any]:
        answer = self.aws.call("ec2", self.home, "DescribeRegions", key="Regions", AllRegions=True)
        return {row["RegionName"]: row.get("OptInStatus", "") for row in answer["Regions"]}

    def _permissions(self, step: str, region: str) -> Mapping[str, Any] | Finding:
        errors = []
        for operation, params in PERMISSIONS[step]:
            try:
                self.aws.call("ec2", region, operation, **params)
            except SourceFailed as failed:
                errors.append(failed)
        return _failed(step, region, errors) if errors else {}

    def _prices(self, region: str) -> Mapping[str, Any]:
        self.aws.call(
            "pricing",
            instance_types.pricing_regions(self.aws, region)[0],
            "GetProducts",
            key="PriceList",
            ServiceCode="AmazonEC2",
            MaxResults=1,
        )
        return {}

    def _quotas(self, region: str) -> Mapping[str, Any] | Finding:
        limits = quotas.limits(self.aws, region)
        answer = {
            name: {
                market: max(limits.get(getattr(quotas.BY_FAMILY[family], market), 0) for family in families)
                for market in ("on_demand", "spot")
            }
            for name, families in SHOWN_QUOTAS.items()
        }
        if not any((*answer["g"].values(), *answer["p"].values())):
            return Finding("quotas", FindingState.WARNING, region, {"code": "no_gpus", **answer})
        return answer

    def _subnets(self, region: str) -> Mapping[str, Any]:
        zones = instance_types.fetch_subnets(self.aws, self.config, region)
        return {"zones": sorted(set(zones.values()))}

    def _image(self, region: str) -> Mapping[str, Any]:
        ids = self._images(region)
        answer = self.aws.call("ec2", region, "DescribeImages", key="Images", ImageIds=ids)["Images"]
        if len(answer) < len(set(ids)):
            raise LaunchFailed(LaunchFailure.AMI, ", ".join(ids))
        return {"images": [{"id": image["ImageId"], "name": image.get("Name", "")} for image in answer]}

    def _images(self, region: str) -> list[str]:
        """The configured image, or AWS's with and without a GPU driver; uncached."""
        if image := in_region(self.config.ami, region):
            return [image]
        names = [ami.PARAMETERS[self.config.architectures[0], gpus] for gpus in (True, False)]
        answer = [self.aws.call("ssm", region, "GetParameter", key="Parameter", Name=name) for name in names]
        return [one["Parameter"]["Value"] for one in answer]

    def _launch(self, region: str) -> Mapping[str, Any] | Finding:
        """Dry runs of a run's launch, on demand and spot."""
        try:
            image = ami.Image(self._images(region)[-1], root_device="", least_gb=0)
        except SourceFailed:
            return Finding("launch", FindingState.SKIPPED, region, {"code": "no_image"})
        errors = []
        for spot in (False, True):
            instance, run = str(uuid.uuid4()), "connection test"
            order = InstanceOrder(instance, "test", region, self._instance_type(), spot, "#!/bin/sh\n", run=run)
            subnet = next(iter(self.config.subnets_in(region)), None)
            errors += self._tried(region, "RunInstances", instances.parameters(self.config, order, image, subnet))
        return _failed("launch", region, errors) if errors else {"instance_type": self._instance_type()}

    def _instance_type(self) -> str:
        small = "t3.micro" if "x86_64" in self.config.architectures else "t4g.micro"
        return next(iter(self.config.instance_types or ()), small)

    def _end(self, region: str) -> Mapping[str, Any] | Finding:
        errors = self._tried(region, "TerminateInstances", {"InstanceIds": [NO_INSTANCE]})
        if not errors:
            return {}
        found = _failed("end", region, errors)
        # A policy that is limited to tagged instances also denies an instance that does not exist.
        return replace(found, state=FindingState.WARNING) if errors[0].code == SourceFailure.ACCESS_DENIED else found

    def _tried(self, region: str, operation: str, params: Mapping[str, Any]) -> list[SourceFailed]:
        """Why it is not allowed, else empty. EC2 checks permissions before parameters."""
        try:
            self.aws.call("ec2", region, operation, DryRun=True, **params)
        except SourceFailed as failed:
            return [] if aws_error(failed).code in MAY_BE_DONE else [failed]
        return []


def _home(regions: Sequence[str]) -> str:
    """The region for calls about the account: an enabled one in the same partition."""
    return regions[0] if regions[0].startswith(OTHER_PARTITIONS) else HOME


def _enabled(region: str, there: Finding) -> Finding:
    """A region's status in DescribeRegions; a warning if that failed."""
    if there.state is not FindingState.OK:
        return Finding("enabled", FindingState.WARNING, region, there.detail, there.errors)
    status = there.detail.get(region)
    if status is None:
        return Finding("enabled", FindingState.FAILED, region, {"code": "unknown_region"})
    if status == "not-opted-in":
        return Finding("enabled", FindingState.FAILED, region, {"code": "not_enabled"})
    return Finding("enabled", FindingState.OK, region)


def _reached(url: str, allow_private: bool) -> Finding:
    answer = public_url.check(url, allow_private=allow_private)
    bad = FindingState.WARNING if answer["code"] in public_url.UNSURE else FindingState.FAILED
    return Finding("public_url", FindingState.OK if answer["code"] == "ok" else bad, detail=answer)


def _answered(step: str, region: str, ask: Callable[[], Mapping[str, Any] | Finding]) -> Finding:
    """The finding of a step; runs in a thread of the pool, with a database connection of its own."""
    try:
        answer = ask()
        return answer if isinstance(answer, Finding) else Finding(step, FindingState.OK, region, answer)
    except SourceFailed as failed:
        return _failed(step, region, [failed])
    except LaunchFailed as failed:
        return Finding(step, FindingState.FAILED, region, {"code": failed.code, "text": failed.text})
    except Exception as error:
        log.warning("testing a connection: %s %s", step, region, exc_info=True)
        return _failed(
            step, region, [SourceFailed(SourceFailure.SERVICE_ERROR, text=f"{type(error).__name__}: {error}")]
        )
    finally:
        connections.close_all()


def _failed(step: str, region: str, failures: Sequence[SourceFailed]) -> Finding:
    """Throttled calls may work later, and an unknown identity is harmless: these are warnings."""
    codes = {failed.code for failed in failures}
    harmless = codes <= {SourceFailure.THROTTLED} or (step == "identity" and not codes & NOT_SIGNED_IN)
    errors = tuple({"code": failed.code, **failed.data} for failed in failures)
    return Finding(step, FindingState.WARNING if harmless else FindingState.FAILED, region, errors=errors)


def _gather(steps: Sequence[Step], ends: float) -> list[Finding]:
    """The findings so far; steps without one failed with `no_answer`."""
    wait([one for *_, one in steps], max(0.0, ends - time.monotonic()))
    return [
        one.result() if one.done() else Finding(step, FindingState.FAILED, region, {"code": "no_answer"})
        for step, region, one in steps
    ]
