"""The pages of offers, quotas and the cache: filtered as asked, honest about what is not known, refreshed by hand."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
from django.http import QueryDict
from django.test import Client
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.backends.aws.instance_types import InstanceType
from dstackweb.backends.aws.kind import AwsBackend
from dstackweb.backends.contract import SourceFailed, SourceKey, SourceState
from dstackweb.backends.models import Backend, Instance
from dstackweb.offers import sources
from dstackweb.offers.models import CacheCount, SourceRow
from dstackweb.offers.source_rows import Freshness
from dstackweb.web.cloud.offer_rows import SourceLine, troubles
from dstackweb.web.cloud.offer_views import OfferFilters
from tests.factories import join, make_host, make_project, make_run, make_user, place_all
from tests.forms import submit
from tests.web.conftest import HTMX

pytestmark = pytest.mark.django_db
SignIn = Callable[[User], Client]
NOW = dt.datetime(2026, 3, 4, 12, tzinfo=dt.UTC)
URL = "/p/main/offers/"


class Aws:
    """What each source of the cloud says; an exception is raised instead."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        zones = ("us-east-1a",)
        self.says: dict[str, Any] = {
            "instance_types": {
                "g6.xlarge": InstanceType("g6.xlarge", "x86_64", 4, 16384, "L4", 1, 24576, True, True, zones),
                "p5.48xlarge": InstanceType("p5.48xlarge", "x86_64", 192, 2097152, "H100", 8, 81920, True, True, zones),
            },
            "prices": {"g6.xlarge": Decimal("0.8048"), "p5.48xlarge": Decimal("55.04")},
            "spot_prices": {"g6.xlarge": {"us-east-1a": Decimal("0.2978")}},
            "quotas": {"L-DB2E81BA": 64, "L-3819A6DF": 64, "L-417A185B": 0},
            "quota_use": {"L-DB2E81BA": 64, "L-3819A6DF": 12, "L-417A185B": 0},
        }
        monkeypatch.setattr(AwsBackend, "fetch", lambda _self, key: self.fetch(key))
        self.backend = Backend.objects.create(
            name="aws", kind="aws", config={"regions": ["us-east-1"], "allow_private_url": True}
        )

    def fetch(self, key: SourceKey) -> Any:
        said = self.says[key.source]
        if isinstance(said, Exception):
            raise said
        return said

    def ask(self) -> None:
        for key in AwsBackend(self.backend).wanted():
            sources.refresh(self.backend, key)


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch, settings: Any, db: None) -> Aws:
    settings.DSTACKWEB_PUBLIC_URL = "https://dstackweb.example.com"
    return Aws(monkeypatch)


@pytest.fixture
def client(ann: User, as_user: SignIn) -> Client:
    return as_user(ann)


def page(client: Client, path: str = URL) -> str:
    response = client.get(path)
    assert response.status_code == 200
    return re.sub(r"\s+", " ", response.content.decode())


def test_offers_show_price_place_and_why_they_can_or_can_not_be_had(aws: Aws, client: Client) -> None:
    aws.ask()
    text = page(client)
    assert "8 × H100 80 GB" in text
    assert "$55.04" in text
    assert "$6.88 per GPU" in text
    assert "64 of 64 vCPUs in use, 4 needed." in text
    assert "Fits 13 more" in text
    assert text.index("$0.2978") < text.index("$0.8048") < text.index("$55.04")
    assert '<rect class="used" width="100.00" height="1" />' in text


def test_filter_fields_narrow_the_list_and_show_the_total(aws: Aws, client: Client) -> None:
    aws.ask()
    text = page(client, f"{URL}?gpu=L4&spot=true")
    assert "of 3 in total" in text
    assert "p5.48xlarge" not in text
    assert "0.8048" not in text
    assert 'value="L4"' in text
    assert "g6.xlarge" not in page(client, f"{URL}?count=8")
    assert "$0.8048" not in page(client, f"{URL}?usable=yes")
    assert "p5.48xlarge" not in page(client, f"{URL}?max_price=%241.00")


def test_a_filter_without_matches_links_to_all_offers(aws: Aws, client: Client) -> None:
    aws.ask()
    text = page(client, f"{URL}?gpu=B200")
    assert "3 offers are available, but none matches." in text
    assert "Show all offers" in text


@pytest.mark.parametrize("query", ["gpu=%3A%3A", "max_price=much", "sort=beauty", "after=nonsense", "memory=x%00y"])
def test_an_invalid_filter_is_ignored_and_reported(aws: Aws, client: Client, query: str) -> None:
    aws.ask()
    text = page(client, f"{URL}?{query}")
    assert "p5.48xlarge" in text
    assert ('role="alert"' in text) == (not query.startswith("after"))


@pytest.mark.parametrize(
    ("query", "count_min", "count_max", "memory"),
    [
        ("gpu=A100", 1, None, None),
        ("gpu=A100:2", 2, 2, None),
        ("gpu=A100&count=4", 4, None, None),
        ("memory=40", 1, None, 40 * 1024),
        ("", 0, None, None),
    ],
)
def test_a_plain_gpu_filter_is_a_minimum(query: str, count_min: int, count_max: int | None, memory: int | None) -> None:
    needs = OfferFilters.of(QueryDict(query)).wanted.requirements
    assert (needs.gpu_count_min, needs.gpu_count_max, needs.gpu_memory_min_mib) == (count_min, count_max, memory)


def test_the_plan_of_a_run_shows_prices_and_why_an_offer_is_or_is_not_available(aws: Aws, client: Client) -> None:
    aws.ask()
    config = "type: task\ncommands: [echo]\nbackends: [aws]\nresources: {gpu: L4}\nspot_policy: auto\n"
    answer = submit(client, "/p/main/submit/", {"config": config}, button="Show plan")
    text = re.sub(r"\s+", " ", answer.content.decode())
    assert "$0.8048/h" in text
    assert "64 of 64 vCPUs in use, 4 needed." in text


def test_own_hosts_are_offers_that_need_no_refresh(project: Project, client: Client) -> None:
    make_host("box-1", gpus=2)
    text = page(client)
    assert "box-1" in text
    assert "2 of 2 GPUs free" in text
    assert "Refresh now" not in text


def test_an_idle_host_without_a_free_gpu_shows_what_is_free(project: Project, client: Client) -> None:
    make_host("box-1", cpus=8, gpus=2)
    make_run(project, join(project, make_user("bo")), "holder", resources={"gpu": 2, "cpu": 1})
    place_all()
    text = page(client)
    assert "7 CPUs free" in text
    assert "0 of 2 GPUs free" not in text


def test_offers_that_were_never_fetched_are_shown_as_loading(aws: Aws, client: Client) -> None:
    text = page(client)
    assert "Loading offers for the first time." in text
    assert "Refreshing 5 sources…" in text


def test_a_cloud_that_refuses_is_shown_with_a_remedy_instead_of_an_empty_list(aws: Aws, client: Client) -> None:
    denied = SourceFailed("access_denied", region="us-east-1", action="ec2:DescribeInstanceTypes")
    aws.says = dict.fromkeys(aws.says, denied)
    aws.ask()
    text = page(client)
    assert "Cloud offers are unknown." in text
    assert text.count("the policy lacks ec2:DescribeInstanceTypes.") == 1 + 5  # said once, and at each source


def test_throttled_quotas_leave_offers_usable_and_show_the_time_of_the_retry(aws: Aws, client: Client) -> None:
    until = timezone.now() + dt.timedelta(minutes=4)
    aws.says["quotas"] = SourceFailed("throttled", region="us-east-1", api="ListServiceQuotas", until=until.isoformat())
    aws.ask()
    text = page(client)
    assert "Quota unknown: throttled." in text
    assert 'data-state="throttled"' in text
    assert re.search(r'aws</b> <span class="stale">throttled</span>, retry <time', text)
    text = page(client, "/p/main/offers/quotas/")
    assert "throttled, retry" in text
    assert "Offers in this region stay usable" in text


def test_a_missing_public_url_is_shown_once(aws: Aws, client: Client, settings: Any) -> None:
    settings.DSTACKWEB_PUBLIC_URL = ""
    aws.ask()
    assert page(client).count("Set DSTACKWEB_PUBLIC_URL") == 1


def test_a_poll_is_answered_only_after_a_source_was_refreshed(aws: Aws, client: Client) -> None:
    aws.ask()
    shown = client.get(URL)["HX-PTag"]
    poll = {**HTMX, "HX-PTag": shown}
    assert client.get(URL, headers=poll).status_code == 204
    SourceRow.objects.filter(source="quotas").update(fetched_at=timezone.now() + dt.timedelta(seconds=1))
    assert client.get(URL, headers=poll).status_code == 200


def test_an_idle_instance_of_the_project_is_an_offer_as_in_the_api(aws: Aws, client: Client, project: Project) -> None:
    aws.ask()
    poll = {**HTMX, "HX-PTag": client.get(URL)["HX-PTag"]}
    now = timezone.now()
    for owner, name in ((project, "g6.2xlarge"), (make_project("others"), "g6.12xlarge")):
        Instance.objects.create(
            backend=aws.backend, project=owner, region="us-east-1", instance_type=name, status="running", cpus=8,
            memory_mib=32768, gpu_name="L4", gpu_count=1, gpu_memory_mib=24576, gpus=["GPU-1"], price=Decimal("0.98"),
            idle_since=now, idle_until=now + dt.timedelta(minutes=5),
        )  # fmt: skip
    answer = client.get(URL, headers=poll)
    assert answer.status_code == 200
    text = page(client, f"{URL}?gpu=L4")
    assert "g6.2xlarge" in text
    assert "Kept from an earlier run of the project" in text
    assert "g6.12xlarge" not in text
    assert "of 4 in total" in text
    assert "g6.2xlarge" not in page(client, f"{URL}?gpu=H100")


def test_members_may_refresh_offers_and_viewers_may_not(
    aws: Aws, client: Client, project: Project, as_user: SignIn
) -> None:
    aws.ask()
    viewer = as_user(join(project, make_user("vic"), "viewer"))
    assert "Refresh now" not in page(viewer)
    assert viewer.post(f"{URL}refresh/").status_code == 403, "which no page of a viewer sends"
    answer = submit(client, f"{URL}?gpu=L4", button="Refresh now", to="/refresh/")
    assert (answer.status_code, answer["Location"]) == (302, f"{URL}?gpu=L4")
    text = page(client)
    assert "Refresh of 5 sources started" in text
    assert "Refreshing 5 sources…" in text


def test_a_refresh_redirects_only_within_the_site(aws: Aws, client: Client) -> None:
    """Whatever is in the hidden field, which pages encode."""
    answer = client.post(f"{URL}refresh/", {"query": "//evil.example/\r\nX: y"})
    assert answer["Location"].startswith(f"{URL}?")
    assert "\n" not in answer["Location"]


def test_quotas_show_usage_and_limit_and_types_without_one(aws: Aws, client: Client) -> None:
    aws.ask()
    text = page(client, "/p/main/offers/quotas/")
    assert re.search(r"<b>64</b> <span [^>]*>of 64</span></span> <span [^>]*>·\s*<span [^>]*>used up", text)


def test_without_a_cloud_the_pages_show_how_to_add_one(project: Project, client: Client) -> None:
    assert "No cloud with quotas" in page(client, "/p/main/offers/quotas/")
    assert "No hosts or clouds yet" in page(client)
    assert "Cloud API calls" not in page(client, "/p/main/health/")


def calls_on_health(client: Client) -> list[str]:
    """The cells of the backend's line: calls, cache hits, calls saved, throttled."""
    section = page(client, "/p/main/health/").split('id="cloud-calls"')[1].split("</section>")[0]
    return [" ".join(cell.split()) for cell in re.findall(r'<td class="num[^>]*>(.*?)</td>', section, re.DOTALL)]


def test_health_sums_the_calls_of_the_last_day(aws: Aws, client: Client) -> None:
    hour = timezone.now().replace(minute=0, second=0, microsecond=0)
    for back, calls in ((0, 10), (3, 30), (50, 1000)):
        CacheCount.objects.create(
            backend=aws.backend,
            hour=hour - dt.timedelta(hours=back),
            hits=600,
            misses=2,
            calls=calls,
            uncached=400,
            throttles=1,
        )
    assert calls_on_health(client) == ["40", "1,200", "95.0 %", "2"]


def test_calls_that_were_not_saved_are_no_percentage(aws: Aws, client: Client) -> None:
    CacheCount.objects.create(backend=aws.backend, hour=timezone.now().replace(minute=0), calls=5, uncached=2)
    assert calls_on_health(client)[2] == "-3"


def test_the_old_address_of_the_cache_page_redirects_to_health(aws: Aws, client: Client) -> None:
    answer = client.get("/p/main/offers/cache/")
    assert (answer.status_code, answer["Location"]) == (302, "/p/main/health/")


def age(state: str, **fields: Any) -> Freshness:
    known = {"fetched_at": NOW, "expires_at": NOW + dt.timedelta(minutes=5)} if state != "failed" else {}
    values = {"fetched_at": None, "expires_at": None, "due_at": None, "error": None, "failed_at": None}
    return Freshness("aws", "aws", "quotas", "eu", SourceState(state), **{**values, **known, **fields})


THROTTLED = {"error": {"code": "throttled"}, "failed_at": NOW}
OLD = {"fetched_at": NOW - dt.timedelta(hours=1), "expires_at": NOW - dt.timedelta(minutes=50)}
LATER = NOW + dt.timedelta(seconds=40)


@pytest.mark.parametrize(
    ("source", "state"),
    [
        (age("fresh"), "fresh"),
        (age("failed"), "asking"),
        (age("fresh", requested=True), "asking"),
        (age("stale", requested=True, **OLD), "asking"),
        (age("stale", **OLD), "stale"),
        (age("stale", due_at=LATER, **THROTTLED), "throttled"),
        (age("failed", due_at=LATER, **THROTTLED), "throttled"),
        (age("failed", due_at=LATER, error={"code": "access_denied"}, failed_at=NOW), "failed"),
        (age("failed", error={"code": "access_denied"}), "asking"),  # refreshed by hand after that
        (age("stale", due_at=LATER, error={"code": "unreachable"}, failed_at=NOW), "stale"),
    ],
)
def test_a_source_is_in_one_of_five_states(source: Freshness, state: str) -> None:
    assert SourceLine.of_source(source).state == state


def test_the_same_problem_in_all_regions_is_shown_once() -> None:
    lines = [
        SourceLine.of_source(
            Freshness(
                "aws", "aws", source, region, SourceState.FAILED, None, None, LATER, {"code": "no_credentials"}, NOW
            )
        )
        for source in ("prices", "quotas")
        for region in ("eu", "us")
    ]
    (found,) = troubles(lines)
    assert (found.place, found.label, len(found.sources)) == ("aws", "no credentials", 4)


def test_a_throttling_cloud_is_one_problem_for_all_its_apis() -> None:
    lines = [
        SourceLine.of_source(
            Freshness(
                "aws", "aws", source, region, SourceState.STALE, NOW, NOW, LATER,
                {"code": "throttled", "api": api, "region": region, "until": LATER.isoformat()}, NOW,
            )
        )
        for source, api in (("prices", "pricing:GetProducts"), ("quotas", "servicequotas:ListServiceQuotas"))
        for region in ("eu", "us")
    ]  # fmt: skip
    (found,) = troubles(lines)
    assert (found.place, found.label, found.names, found.again_at) == ("aws", "throttled", ["prices", "quotas"], LATER)
    assert found.texts == [
        "Throttled: pricing:GetProducts (eu, us), servicequotas:ListServiceQuotas (eu, us). Retried automatically."
    ]


def test_without_a_cloud_an_admin_gets_a_link_to_the_form_and_a_member_the_admins_names(
    client: Client, as_user: SignIn, project: Project
) -> None:
    join(project, make_user("root", is_staff=True), "admin")
    assert "Admins who can add a cloud: root." in page(client)
    make_host("box-1")
    text = page(client)
    assert "No cloud is set up. Admins who can add one: root." in text
    assert "/admin/" not in text
    assert "/admin/backends/backend/add/" in page(as_user(User.objects.get(username="root")))
