"""`dstackweb offers`, `quotas` and `cache`."""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import pytest
from django.utils import timezone
from rich.console import Console

from dstackweb.accounts.models import Project
from dstackweb.backends.aws.kind import AwsBackend
from dstackweb.backends.contract import Availability, Offer, SourceFailed, SourceKey
from dstackweb.backends.models import Backend
from dstackweb.cli import client, offers as command
from dstackweb.cli.config import Settings
from dstackweb.cli.tables import watch_view
from dstackweb.offers import catalog, source_rows, sources
from dstackweb.offers.models import CacheCount, SourceRow
from tests.backends.kinds import use_driver
from tests.cli.conftest import Cli
from tests.factories import make_host
from tests.offers.cloud_stub import Cloud

QUOTA = {"code": "no_quota", "fits": 0, "limit": 64, "used": 64, "needs": 4}


@pytest.fixture(autouse=True)
def cloud(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, project: Project) -> Cloud:
    catalog.forget()
    sources.forget()
    monkeypatch.setattr(sources, "TICK_S", 60.0)
    made = Cloud(monkeypatch, tmp_path / "asked")
    gpu = {"gpu_name": "NVIDIA A10G", "gpu_count": 1, "gpu_memory_mib": 24576}
    made.answer = (
        Offer(
            "cluster", "g5.xlarge", 4, 16384, Availability.NO_QUOTA, "eu", price=Decimal("1.006"), detail=QUOTA, **gpu
        ),
        Offer("cluster", "g5.xlarge", 4, 16384, Availability.UNKNOWN, "eu", spot=True, price=Decimal("0.503"), **gpu),
    )
    return made


@pytest.fixture
def cluster() -> Backend:
    return Backend.objects.create(name="cluster", kind="plain")


def test_each_offer_is_a_line_with_its_price_a_bar_and_why(cli: Cli, cluster: Backend) -> None:
    make_host("box-1", cpus=8, gpus=1)
    output = cli.ok("offers").splitlines()
    assert output[0].split() == ["OFFER", "CPU", "MEMORY", "GPU", "PRICE/H", "KIND", "AVAILABILITY", "WHY"]
    host, spot, on_demand = (line.split() for line in output[1:])
    assert (host[:2], host[-6:]) == (["hosts", "box-1"], ["idle", "1", "of", "1", "GPUs", "free"])
    assert ("own" in host, "spot" in spot, "on-demand" in on_demand) == (True, True, True)
    assert ("$0.503" in spot, "████" in spot, "unknown" in spot) == (True, True, True)
    assert "████████  no_quota      No quota: 64 of 64 vCPUs in use, 4 needed." in output[3]


def test_options_narrow_it_down_and_sort_it(cli: Cli, cloud: Cloud, cluster: Backend) -> None:
    assert "own" not in cli.ok("offers", "--gpu", "A10G:1..", "--backend", "cluster", "--on-demand")
    assert len(cli.ok("offers", "--spot", "--region", "eu", "--max-price", "0.6").splitlines()) == 2
    prices = [item["price"] for item in json.loads(cli.ok("offers", "--sort", "-price", "--json"))["items"]]
    assert prices == [1.006, 0.503]
    some = cli("offers", "--limit", "1")
    assert "Showing 1 of 2 offers; for more: --limit" in some.stderr


def test_invalid_options_are_refused(cli: Cli, cluster: Backend) -> None:
    refused = cli("offers", "--gpu", "A100:x..")
    assert (refused.exit_code, "`gpu` should be a GPU request" in refused.stderr) == (1, True)
    assert cli("offers", "--watch").exit_code == 2


def test_without_offers_the_reason_of_a_failed_backend_is_shown(cli: Cli, cloud: Cloud, cluster: Backend) -> None:
    cloud.answer = RuntimeError("the scheduler is away")
    output = cli("offers")
    assert (output.exit_code, output.stdout) == (0, "")
    assert "No matching offers." in output.stderr
    assert "warning: cluster: Its offers cannot be read: the scheduler is away" in output.stderr


@pytest.mark.usefixtures("live_server")  # sources are read in threads
def test_ages_and_failures_of_sources_are_shown(cli: Cli, cloud: Cloud) -> None:
    Backend.objects.create(name="aws", kind="aws")
    cloud.says[SourceKey("types", "us")] = SourceFailed("access_denied", action="ec2:Describe", region="us")
    sources.refresh_due(timezone.now())
    output = cli("offers").stderr
    assert re.search(r"aws: spot [0-9] s old, types [0-9] s old \(unknown in 1 of 2 regions\)", output)
    assert output.count("warning: aws: Access denied in us: the policy lacks ec2:Describe.") == 1


@pytest.mark.usefixtures("live_server")  # sources are read in threads
def test_a_refresh_waits_for_the_refreshed_sources(cli: Cli, cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    Backend.objects.create(name="aws", kind="aws")
    sources.refresh_due(timezone.now())
    cloud.says[SourceKey("types", "eu")] = ["g6"]
    slept = []

    def ticks(seconds: float) -> None:
        slept.append(seconds)
        sources.refresh_due(timezone.now())

    monkeypatch.setattr(client, "Api", partial(client.Api, sleep=ticks))
    monkeypatch.setattr(source_rows, "REFRESH_EVERY_S", 0.0)
    output = cli("offers", "--refresh")
    assert "Refreshing aws …" in output.stderr
    assert ("g6" in output.stdout, "g5" in output.stdout, len(slept)) == (True, False, 1)


def test_without_a_cloud_there_is_nothing_to_refresh(cli: Cli) -> None:
    make_host("box-1")
    output = cli("offers", "--refresh")
    assert ("hosts are always current" in output.stderr, "box-1" in output.stdout) == (True, True)


@pytest.fixture
def quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stub(AwsBackend):
        def fetch(self, key: SourceKey) -> Any:
            known = {"quotas": {"L-DB2E81BA": 64, "L-417A185B": 0}, "quota_use": {"L-DB2E81BA": 48, "L-417A185B": 0}}
            return known.get(key.source, {"x": {}})

    use_driver(monkeypatch, "aws", Stub)
    Backend.objects.create(name="aws", kind="aws", config={"regions": ["eu-west-1"]})


@pytest.mark.usefixtures("live_server")  # sources are read in threads
def test_quotas_are_lines_with_their_usage(cli: Cli, quoted: None) -> None:
    sources.refresh_due(timezone.now())
    output = cli("quotas")
    (line,) = output.stdout.splitlines()[1:]
    assert line.split() == [
        "aws", "eu-west-1", "Running", "On-Demand", "G", "and", "VT", "instances", "48", "64", "███████▌",
    ]  # fmt: skip
    assert ("1 quota of zero not shown" in output.stderr, "aws: quotas 0 s old" in output.stderr) == (True, True)
    assert len(cli.ok("quotas", "aws", "--all").splitlines()) == 3
    assert json.loads(cli.ok("quotas", "--json"))["aws"][0]["items"][0]["used"] == 0


def test_the_cache_shows_totals_and_the_hours_of_one_backend(cli: Cli, quoted: None) -> None:
    backend = Backend.objects.get(name="aws")
    CacheCount.objects.all().delete()
    hour = timezone.now().replace(minute=0, second=0, microsecond=0)
    for ago, hits in enumerate([5, 7]):
        at = hour - dt.timedelta(hours=ago)
        CacheCount.objects.create(backend=backend, hour=at, hits=hits, uncached=hits * 4, calls=2)
    lines = cli.ok("cache").splitlines()
    assert lines[1].split()[:6] == ["aws", "12", "0", "0", "4", "44"]
    assert len(cli.ok("cache", "aws").strip().splitlines()) == 6
    assert len(cli.ok("cache", "aws", "--hours", "1").strip().splitlines()) == 5


@pytest.mark.usefixtures("live_server")  # sources are read in threads
def test_each_offer_shows_the_age_of_what_tells_its_price_and_availability(cli: Cli, cloud: Cloud) -> None:
    Backend.objects.create(name="aws", kind="aws")
    sources.refresh_due(timezone.now())
    SourceRow.objects.filter(source="types").update(fetched_at=timezone.now() - dt.timedelta(minutes=11))
    offers = json.loads(cli.ok("offers", "--json"))
    assert {(source["source"], source["tells"], source["spot"]) for source in offers["sources"]} == {
        ("types", "availability", None),
        ("spot", "price", True),
    }
    header, *lines = cli.ok("offers").splitlines()
    assert "AGE" in header
    assert all("types 11 min (stale)" in line and "spot" not in line for line in lines)


def test_without_clouds_quotas_and_cache_are_empty(cli: Cli, connect: Callable[..., Cli]) -> None:
    assert "No quotas." in cli("quotas").stderr
    assert "No cloud backends." in cli("cache").stderr
    assert cli("quotas", "none").exit_code == 1


def test_watching_outlasts_an_outage_until_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    page: dict[str, Any] = {"items": [], "next": None, "total": 0, "sources": []}
    answers: list[httpx.Response | Exception] = [httpx.ConnectError("refused"), httpx.Response(200, json=page)]

    def answer(_request: httpx.Request) -> httpx.Response:
        given = answers.pop(0)
        if isinstance(given, Exception):
            raise given
        return given

    def pause(seconds: float) -> None:
        if not answers:
            raise KeyboardInterrupt

    out = StringIO()
    api = client.Api(Settings("http://x", "t", "main", ""), transport=httpx.MockTransport(answer), sleep=pause)
    console = Console(file=out, force_terminal=True, width=100)
    watch_view(api, page, lambda: api.get("/offers"), command.view_of, console=console, every_s=command.WATCH_S)
    assert out.getvalue().count("No matching offers.") >= 2
    assert "can't reach http://x: refused. Trying again …" in out.getvalue()


def test_throttled_apis_of_a_backend_share_one_warning() -> None:
    def source(backend: str, error: dict[str, Any] | None) -> dict[str, Any]:
        return {"backend": backend, "error": error}

    def throttled(api: str, region: str) -> dict[str, Any]:
        return {"code": "throttled", "api": api, "region": region, "message": "too long to read twice"}

    output = command.problems(
        [
            source("aws", throttled("ec2:DescribeInstanceTypes", "eu")),
            source("aws", throttled("ec2:DescribeInstanceTypes", "us")),
            source("aws", {"code": "access_denied", "message": "Allow it."}),
            source("other", None),
        ]
    )
    assert output == [
        "aws: Allow it.",
        "aws: throttled, retrying later: ec2:DescribeInstanceTypes (eu), ec2:DescribeInstanceTypes (us)",
    ]
