"""A cloud in four regions for pages: one fresh, one throttled, one without permission, one not asked yet."""

from __future__ import annotations

import datetime as dt
import math
import random
import uuid
from decimal import Decimal
from typing import Any

import pytest
from django.conf import settings
from django.utils import timezone

from dstackweb.accounts.models import Project
from dstackweb.backends.aws.instance_types import InstanceType
from dstackweb.backends.aws.kind import AwsBackend
from dstackweb.backends.contract import SourceFailed, SourceKey
from dstackweb.backends.models import Backend, Instance, InstanceStatus
from dstackweb.offers import sources
from dstackweb.offers.models import CacheCount, SourceRow
from dstackweb.runs.models import BudgetMark, Job, Run

TYPES = (
    ("m6i.large", 2, 8, "", 0, 0, "0.096"),
    ("c6i.2xlarge", 8, 16, "", 0, 0, "0.34"),
    ("g4dn.xlarge", 4, 16, "T4", 1, 16, "0.526"),
    ("g6.xlarge", 4, 16, "L4", 1, 24, "0.8048"),
    ("g5.xlarge", 4, 16, "A10G", 1, 24, "1.006"),
    ("g6e.2xlarge", 8, 64, "L40S", 1, 48, "2.2421"),
    ("g5.12xlarge", 48, 192, "A10G", 4, 24, "5.672"),
    ("p4d.24xlarge", 96, 1152, "A100", 8, 40, "32.7726"),
    ("p5.48xlarge", 192, 2048, "H100", 8, 80, "55.04"),
)
REGIONS = ("us-east-1", "us-west-2", "eu-central-1", "ap-northeast-1")


def says(key: SourceKey) -> Any:
    """What the cloud answers; raised where it refuses."""
    match key.source, key.region:
        case _, "ap-northeast-1":
            actions = {"quotas": "servicequotas:ListServiceQuotas", "prices": "pricing:GetProducts"}
            action = actions.get(key.source, "ec2:DescribeInstanceTypes")
            raise SourceFailed("access_denied", region=key.region, action=action, api="ec2")
        case "quotas", "us-west-2":
            until = timezone.now() + dt.timedelta(minutes=4, seconds=12)
            raise SourceFailed(
                "throttled",
                region=key.region,
                api="service-quotas.ListServiceQuotas",
                until=until.isoformat(),
                by="aws",
            )
        case "instance_types", region:
            zones = (f"{region}a", f"{region}b")
            return {
                name: InstanceType(name, "x86_64", cpus, gib * 1024, gpu, count, memory * 1024, True, True, zones)
                for name, cpus, gib, gpu, count, memory, _price in TYPES
            }
        case "prices", _:
            return {name: Decimal(price) for name, *_rest, price in TYPES}
        case "spot_prices", region:
            return {name: {f"{region}a": Decimal(price) * Decimal("0.37")} for name, *_rest, price in TYPES}
        case "quotas", _:
            return {
                "L-1216C47A": 512, "L-34B43A08": 256, "L-DB2E81BA": 64, "L-3819A6DF": 64, "L-417A185B": 384,
                "L-7212CCBC": 0, "L-C4BD4855": 0, "L-7295265B": 0, "L-E3A00192": 0,
            }  # fmt: skip
        case "quota_use", _:
            return {"L-1216C47A": 96, "L-DB2E81BA": 64, "L-3819A6DF": 52, "L-417A185B": 192}
    return {}


def build(project: Project, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """The cloud, asked where it is asked; two days of counts; machines that serve, idle, start and have gone."""
    monkeypatch.setattr(settings, "DSTACKWEB_PUBLIC_URL", "https://dstackweb.example.com")
    monkeypatch.setattr(AwsBackend, "fetch", lambda _self, key: says(key))
    backend = Backend.objects.create(name="aws", kind="aws", config={"regions": [*REGIONS], "allow_private_url": True})
    for key in AwsBackend(backend).wanted():
        if key.region != "eu-central-1" or key.source == "instance_types":
            sources.refresh(backend, key)
    now = timezone.now()
    for seconds, (source, region) in enumerate((("spot_prices", "us-east-1"), ("quotas", "us-east-1"))):
        SourceRow.objects.filter(source=source, region=region).update(
            fetched_at=now - dt.timedelta(seconds=71 + 60 * seconds)
        )
    SourceRow.objects.filter(source="instance_types").exclude(stamp="").update(fetched_at=now - dt.timedelta(hours=2))
    counts(backend, now)
    machines(backend, project, now)
    Project.objects.filter(pk=project.pk).update(monthly_budget=Decimal(400))
    BudgetMark.objects.create(
        project=project, month=now.date().replace(day=1), percent=80, spent=Decimal(321), budget=Decimal(400)
    )
    return backend


def counts(backend: Backend, now: dt.datetime) -> None:
    """Two days with busy afternoons, and an hour of throttles."""
    rnd = random.Random(5)
    hour = now.replace(minute=0, second=0, microsecond=0)
    for back in range(48):
        at = hour - dt.timedelta(hours=back)
        looks = int(rnd.uniform(20, 60) * (1.2 + math.sin(at.hour / 24 * 6.28)))
        CacheCount.objects.update_or_create(
            backend=backend,
            hour=at,
            defaults={
                "hits": looks, "misses": looks // 9, "coalesced": looks // 14, "calls": rnd.randrange(18, 40),
                "uncached": looks * 8, "throttles": 7 if back == 5 else 0, "failures": 7 if back == 5 else 0,
                "stale_served": 12 if back == 5 else 0,
            },
        )  # fmt: skip


def machines(backend: Backend, project: Project, now: dt.datetime) -> None:
    """One that serves, one that idles, one that starts, one that is taken back, and three that have gone."""
    runs = list(Run.objects.filter(project=project, status="running").order_by("pk"))

    def make(instance_type: str, price: str, hours: float, status: str, **fields: Any) -> Instance:
        gpu = next(row for row in TYPES if row[0] == instance_type)
        began = now - dt.timedelta(hours=hours)
        return Instance.objects.create(
            backend=backend, project=project, region="us-east-1", zone="us-east-1a", instance_type=instance_type,
            price=Decimal(price), cpus=gpu[1], memory_mib=gpu[2] * 1024, gpu_name=gpu[3], gpu_count=gpu[4],
            gpu_memory_mib=gpu[5] * 1024, status=status, created_at=began,
            **{"launched_at": began, "cloud_id": f"i-0{uuid.uuid4().hex[:16]}", **fields},
        )  # fmt: skip

    job = Job.objects.filter(run=runs[0]).first()
    assert job
    serves = make("g5.12xlarge", "5.672", 6.3, InstanceStatus.RUNNING, holder=job.pk)
    on_it = {"backend": backend, "host": None, "region": "us-east-1", "instance_type": serves.instance_type}
    began = now - dt.timedelta(hours=6.2)
    Job.objects.filter(pk=job.pk).update(instance=serves, price=serves.price, placed_at=began, **on_it)
    make(
        "g6.xlarge", "0.2978", 1.4, InstanceStatus.RUNNING, is_spot=True,
        idle_since=now, idle_until=now + dt.timedelta(minutes=4, seconds=40),
    )  # fmt: skip
    make("p5.48xlarge", "55.04", 0.01, InstanceStatus.STARTING)
    make(
        "g5.xlarge", "0.37", 3, InstanceStatus.RUNNING, is_spot=True, holder=uuid.uuid4(),
        interrupted_at=now + dt.timedelta(seconds=100),
    )  # fmt: skip
    make("p4d.24xlarge", "32.7726", 19, InstanceStatus.GONE, why="finished", ended_at=now - dt.timedelta(hours=10))
    make(
        "p5.48xlarge", "20.36", 1, InstanceStatus.GONE, is_spot=True, launched_at=None, cloud_id="", why="no_capacity",
        error="There is no Spot capacity available that matches your request.", ended_at=now - dt.timedelta(hours=1),
    )  # fmt: skip
    make("g6.xlarge", "0.2978", 9, InstanceStatus.GONE, is_spot=True, why="interrupted",
         ended_at=now - dt.timedelta(hours=2))  # fmt: skip
