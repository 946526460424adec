"""The same on a small AWS, through real boto3: from the queue to an instance, past a refusal, and to its end."""

from __future__ import annotations

import datetime as dt

import pytest
from django.utils import timezone
from pytest_django import Settings

from dstackweb.accounts.models import Project, User
from dstackweb.backends.contract import SourceKey
from dstackweb.backends.models import Backend, Instance
from dstackweb.offers import sources
from dstackweb.offers.models import SourceRow
from dstackweb.runs import services
from dstackweb.runs.models import Run
from dstackweb.scheduler.cloud import watch as cloud_watch
from standins.aws import Cloud
from tests.backends.aws.conftest import REGION, as_a_new_process, backend
from tests.factories import make_run, place_all
from tests.standins.fixtures import cloud

__all__ = ["as_a_new_process", "backend", "cloud"]

pytestmark = pytest.mark.django_db


@pytest.mark.slow
def test_a_run_gets_the_next_offer_after_a_refusal_and_releases_the_instance(
    project: Project, member: User, cloud: Cloud, backend: Backend, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.DSTACKWEB_PUBLIC_URL = settings.DSTACKWEB_API_URL = "https://gpus.example.org"
    for source in ("instance_types", "prices", "quotas", "spot_prices"):
        sources.refresh(backend, SourceKey(source, REGION))
    wanted = ["m5.large", "m5.xlarge"]
    cloud.capacity(0, "m5.large")
    run = make_run(project, member, backends=["cloud"], instance_types=wanted, resources={"cpu": "2.."})
    assert place_all() == 1
    cloud_watch.poll_all()
    refused, started = Instance.objects.order_by("created_at")
    assert (refused.instance_type, refused.status, refused.why) == ("m5.large", "gone", "no_capacity")
    assert (started.instance_type, started.status) == ("m5.xlarge", "starting")
    assert SourceRow.objects.get(source="quotas").generation == 0, "own instances count by rows"
    cloud_watch.poll_all()
    assert cloud.count("ec2", "RunInstances", REGION) == 2
    services.stop(Run.objects.get(pk=run.pk), member, "member")
    now = timezone.now()
    for minutes in range(1, 20):
        later = now + dt.timedelta(minutes=minutes)
        monkeypatch.setattr(timezone, "now", lambda later=later: later)
        cloud_watch.poll_all()
        if Instance.objects.get(pk=started.pk).status == "gone":
            break
    assert Instance.objects.get(pk=started.pk).status == "gone"
