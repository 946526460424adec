"""Machines that EC2 really starts and ends, as a backend's code sees them."""

from __future__ import annotations

import datetime as dt
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from django.utils import timezone

from dstackweb.backends import registry
from dstackweb.backends.aws import ami, client, config, instances, rate_limits
from dstackweb.backends.aws.kind import AwsBackend
from dstackweb.backends.contract import CloudInstance, InstanceOrder, InstanceState, LaunchFailed, SourceFailed
from dstackweb.backends.models import Backend
from standins.aws import Cloud
from tests.backends.aws.conftest import REGION
from tests.support import eventually

DEPLOYMENT = "d" * 20
SCRIPT = "#!/bin/sh\nsleep 300\n"


@pytest.fixture(autouse=True)
def nothing_known_of_images(unlimited_launches: None) -> None:
    ami.forget()


@pytest.fixture
def code(backend: Backend) -> AwsBackend:
    return AwsBackend(backend)


def configured(backend: Backend, **more: Any) -> AwsBackend:
    """The backend's code under a changed configuration."""
    backend.config = {**backend.config, **more}
    config.read(backend.config)
    backend.version += 1
    backend.save()
    return AwsBackend(backend)


def order(**more: Any) -> InstanceOrder:
    said = {"region": REGION, "instance_type": "t3.small", "spot": False, "user_data": SCRIPT}
    return InstanceOrder(**{"instance": str(uuid.uuid4()), "deployment": DEPLOYMENT, **said, **more})


def seen(code: AwsBackend, cloud_id: str) -> CloudInstance:
    return next(each for each in code.instances(REGION, DEPLOYMENT) if each.cloud_id == cloud_id)


def until(code: AwsBackend, cloud_id: str, state: InstanceState) -> CloudInstance:
    eventually(lambda: seen(code, cloud_id).state == state, 5)
    return seen(code, cloud_id)


def described(cloud: Cloud, machine: CloudInstance) -> dict[str, Any]:
    found = cloud.client("ec2", machine.region).describe_instances(InstanceIds=[machine.cloud_id])
    return dict(found["Reservations"][0]["Instances"][0])


def subnets(cloud: Cloud, *zones: str) -> list[str]:
    """The default subnets of zones."""
    found = cloud.client("ec2").describe_subnets()["Subnets"]
    of = {subnet["AvailabilityZone"]: subnet["SubnetId"] for subnet in found}
    return [of[f"{REGION}{zone}"] for zone in zones]


def test_the_registry_knows_that_aws_starts_machines_and_hosts_do_not(backend: Backend) -> None:
    assert "aws" in registry.cloud_kinds()
    assert list(registry.cloud(backend).regions()) == [REGION]
    with pytest.raises(registry.UnknownKind):
        registry.hosts(backend)
    with pytest.raises(registry.UnknownKind):
        registry.cloud(Backend(name="here", kind="hosts"))


def test_a_machine_starts_runs_and_ends(code: AwsBackend, cloud: Cloud) -> None:
    wanted = order()
    started = code.launch(wanted)
    assert (started.instance, started.region, started.state) == (wanted.instance, REGION, InstanceState.STARTING)
    assert started.launched_at is not None
    assert started.zone.startswith(REGION)
    running = until(code, started.cloud_id, InstanceState.RUNNING)
    assert (running.instance, running.why, running.launched_at) == (wanted.instance, "", started.launched_at)
    assert running.address.count(".") == 3
    code.terminate(REGION, [started.cloud_id])
    gone = until(code, started.cloud_id, InstanceState.GONE)
    assert (gone.why, gone.instance) == ("cloud", wanted.instance)
    assert "User initiated" in gone.text


def test_user_data_runs_on_the_instance_and_its_own_shutdown_terminates_it(code: AwsBackend, cloud: Cloud) -> None:
    started = code.launch(order(user_data="#!/bin/sh\necho so > written\nshutdown -h now\n"))
    gone = until(code, started.cloud_id, InstanceState.GONE)
    assert (Path(cloud.machine(started.cloud_id)["folder"]) / "root" / "written").read_text() == "so\n"
    assert gone.why == "cloud"


class TestOrder:
    def test_twice_is_one_machine(self, code: AwsBackend, cloud: Cloud) -> None:
        wanted = order()
        assert code.launch(wanted).cloud_id == code.launch(wanted).cloud_id
        assert len(cloud.machines()) == 1

    @pytest.mark.django_db(transaction=True)
    def test_by_several_at_once_is_one_machine(self, code: AwsBackend, cloud: Cloud) -> None:
        wanted = order()

        def launch(_: int) -> str:
            try:
                return code.launch(wanted).cloud_id
            finally:
                connection.close()

        with ThreadPoolExecutor(4) as threads:
            assert len(set(threads.map(launch, range(4)))) == 1
        assert len(cloud.machines()) == 1

    def test_whose_answer_was_lost_finds_its_machine(
        self, backend: Backend, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        code, wanted = AwsBackend(backend), order()
        monkeypatch.setattr(client, "ONCE", client.Patience("standard", 1, connect_s=1, read_s=0.2, turn_s=1))
        code.launch(order())
        cloud.latency(0.5, "ec2", "RunInstances")
        with pytest.raises(SourceFailed) as failed:
            code.launch(wanted)
        assert failed.value.code == "unreachable"
        eventually(lambda: len(cloud.machines()) == 2, 5)
        cloud.forget_calls()
        (there,) = subnets(cloud, "b")
        again = configured(backend, disk_gb=200, subnets=there).launch(wanted)
        assert again.instance == wanted.instance
        assert cloud.count("ec2", "RunInstances") == 0

    @pytest.mark.parametrize("found", [True, False])
    def test_that_differs_from_an_earlier_one_with_its_token_is_found_by_its_tag(
        self, backend: Backend, cloud: Cloud, monkeypatch: pytest.MonkeyPatch, found: bool
    ) -> None:
        wanted = order()
        first = AwsBackend(backend).launch(wanted)
        looks = iter([None, first if found else None])
        monkeypatch.setattr(instances, "_find_by_order", lambda *_: next(looks))
        code = configured(backend, disk_gb=200)
        if found:
            assert code.launch(wanted).cloud_id == first.cloud_id
        else:
            with pytest.raises(SourceFailed, match="IdempotentParameterMismatch"):
                code.launch(wanted)
        assert len(cloud.machines()) == 1

    def test_of_another_deployment_is_another_machine(self, code: AwsBackend) -> None:
        ours, theirs = code.launch(order()), code.launch(order(deployment="e" * 20))
        assert [each.cloud_id for each in code.instances(REGION, DEPLOYMENT)] == [ours.cloud_id]
        assert [each.cloud_id for each in code.instances(REGION, "e" * 20)] == [theirs.cloud_id]


class TestWhatIsOrdered:
    def test_is_as_the_configuration_says(self, backend: Backend, cloud: Cloud) -> None:
        ec2, iam = cloud.client("ec2"), cloud.client("iam")
        ec2.create_key_pair(KeyName="team")
        iam.create_instance_profile(InstanceProfileName="runs")
        (subnet,) = subnets(cloud, "c")
        group = ec2.create_security_group(GroupName="runs", Description="runs")["GroupId"]
        code = configured(
            backend,
            subnets={REGION: subnet},
            security_groups=[group],
            instance_profile="runs",
            ssh_key={"*": "team"},
            disk_gb=150,
            tags={"team": "vision", "dstackweb:instance": "not this"},
        )
        wanted = order(project="main", run="train-1")
        started = code.launch(wanted)
        found = described(cloud, started)
        assert (found["SubnetId"], found["Placement"]["AvailabilityZone"]) == (subnet, f"{REGION}c")
        assert [each["GroupId"] for each in found["NetworkInterfaces"][0]["Groups"]] == [group]
        assert found["IamInstanceProfile"]["Arn"].endswith("/runs")
        assert found["KeyName"] == "team"
        metadata = found["MetadataOptions"]
        assert (metadata["HttpTokens"], metadata["HttpPutResponseHopLimit"]) == ("required", 1)
        assert found["ClientToken"] == wanted.instance
        tags = {
            "Name": "dstackweb train-1",
            "team": "vision",
            "dstackweb:deployment": DEPLOYMENT,
            "dstackweb:instance": wanted.instance,
            "dstackweb:project": "main",
            "dstackweb:run": "train-1",
        }
        assert {tag["Key"]: tag["Value"] for tag in found["Tags"]} == tags
        (disk,) = ec2.describe_volumes(Filters=[{"Name": "attachment.instance-id", "Values": [started.cloud_id]}])[
            "Volumes"
        ]
        assert (disk["Size"], disk["VolumeType"]) == (150, "gp3")
        assert {tag["Key"]: tag["Value"] for tag in disk["Tags"]} == tags
        asked = ec2.describe_instance_attribute(
            InstanceId=started.cloud_id, Attribute="instanceInitiatedShutdownBehavior"
        )
        assert asked["InstanceInitiatedShutdownBehavior"]["Value"] == "terminate"

    @pytest.mark.parametrize("public_ip", [True, False])
    def test_has_a_public_address_where_one_is_wanted(self, backend: Backend, cloud: Cloud, public_ip: bool) -> None:
        (subnet,) = subnets(cloud, "a")
        started = configured(backend, public_ip=public_ip, subnets=subnet).launch(order())
        assert bool(described(cloud, started).get("PublicIpAddress")) == public_ip

    @pytest.mark.parametrize(
        ("instance_type", "image"),
        [
            ("g5.xlarge", "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04)"),
            ("t3.small", "ubuntu-24.04-amd64-server"),
        ],
    )
    def test_starts_from_the_newest_public_image_for_its_gpus(
        self, code: AwsBackend, cloud: Cloud, instance_type: str, image: str
    ) -> None:
        started = code.launch(order(instance_type=instance_type))
        code.launch(order(instance_type=instance_type))
        (found,) = cloud.client("ec2").describe_images(ImageIds=[described(cloud, started)["ImageId"]])["Images"]
        assert image in found["Name"]
        assert cloud.count("ssm", "GetParameter") == cloud.count("ec2", "DescribeInstanceTypes") == 1

    def test_starts_from_the_configured_image(self, backend: Backend, cloud: Cloud) -> None:
        image = cloud.image()
        started = configured(backend, ami={REGION: image}).launch(order())
        assert described(cloud, started)["ImageId"] == image
        assert cloud.count("ssm") == 0

    def test_starts_from_a_newer_image_once_the_known_one_was_withdrawn(self, code: AwsBackend, cloud: Cloud) -> None:
        code.launch(order())
        (key,) = ami._ids
        asked_at, known = ami._ids[key]
        ami._ids[key] = asked_at, "ami-0000000000000000f"
        with pytest.raises(LaunchFailed) as failed:
            code.launch(order())
        assert failed.value.code == "ami"
        assert described(cloud, code.launch(order()))["ImageId"] == known

    def test_as_spot_may_be_taken_back(self, code: AwsBackend, cloud: Cloud) -> None:
        started = code.launch(order(spot=True))
        assert described(cloud, started)["InstanceLifecycle"] == "spot"
        until(code, started.cloud_id, InstanceState.RUNNING)
        cloud.interrupt(started.cloud_id, notice_s=0)
        assert until(code, started.cloud_id, InstanceState.GONE).why == "interrupted"


class TestNoCapacity:
    def test_is_reported_after_one_call(self, code: AwsBackend, cloud: Cloud) -> None:
        cloud.capacity(0, "t3.small", market="on-demand")
        with pytest.raises(LaunchFailed, match="do not have sufficient") as failed:
            code.launch(order())
        assert failed.value.code == "no_capacity"
        assert cloud.count("ec2", "RunInstances") == 1
        assert code.launch(order(spot=True)).cloud_id

    def test_in_one_zone_leads_to_a_subnet_in_another(self, backend: Backend, cloud: Cloud) -> None:
        first, second = subnets(cloud, "a", "b")
        vpc = cloud.client("ec2").describe_subnets(SubnetIds=[first])["Subnets"][0]["VpcId"]
        beside = cloud.client("ec2").create_subnet(
            VpcId=vpc, CidrBlock="172.31.240.0/24", AvailabilityZone=f"{REGION}a"
        )["Subnet"]["SubnetId"]
        cloud.capacity(0, zone=f"{REGION}a")
        code = configured(backend, subnets=[first, beside, second])
        with pytest.raises(LaunchFailed) as failed:
            code.launch(order())
        assert failed.value.data == {"zone": f"{REGION}a", "elsewhere": True}
        assert code.launch(order(full_zones=(f"{REGION}a",))).zone == f"{REGION}b"
        assert cloud.count("ec2", "RunInstances") == 2

    @pytest.mark.parametrize("named", [True, False])
    def test_of_a_price_by_zone_is_tried_where_it_was_meant_to_be(
        self, backend: Backend, cloud: Cloud, named: bool
    ) -> None:
        code = configured(backend, subnets=subnets(cloud, "a", "b", "c") if named else {})
        zones = (f"{REGION}c", f"{REGION}b")
        assert code.launch(order(spot=True, zones=zones)).zone == f"{REGION}c"
        cloud.capacity(0, zone=f"{REGION}c")
        with pytest.raises(LaunchFailed) as failed:
            code.launch(order(spot=True, zones=zones))
        assert failed.value.data == {"zone": f"{REGION}c", "elsewhere": True}
        full = {"full_zones": (f"{REGION}c",)}
        assert code.launch(order(spot=True, zones=zones, **full)).zone == f"{REGION}b"
        cloud.capacity(0, zone=f"{REGION}b")
        with pytest.raises(LaunchFailed) as failed:
            code.launch(order(spot=True, zones=zones, **full))
        assert (failed.value.code, failed.value.data["elsewhere"]) == ("no_capacity", False)

    def test_where_no_subnet_is_in_its_zones_says_so(self, backend: Backend, cloud: Cloud) -> None:
        code = configured(backend, subnets=subnets(cloud, "a"))
        with pytest.raises(LaunchFailed, match="no subnet") as failed:
            code.launch(order(spot=True, zones=(f"{REGION}b",)))
        assert failed.value.code == "network"

    def test_anywhere_is_reported_after_all_zones_were_tried_by_a_call_each(
        self, backend: Backend, cloud: Cloud
    ) -> None:
        cloud.capacity(0)
        code, full, answers = configured(backend, subnets=subnets(cloud, "a", "b", "c")), [], []
        for number in range(1, 4):
            with pytest.raises(LaunchFailed) as failed:
                code.launch(order(full_zones=tuple(full)))
            assert cloud.count("ec2", "RunInstances") == number
            full.append(failed.value.data["zone"])
            answers.append((failed.value.code, failed.value.data["elsewhere"]))
        assert answers == [("no_capacity", True), ("no_capacity", True), ("no_capacity", False)]


class TestRefusal:
    def test_for_want_of_a_quota(self, code: AwsBackend, cloud: Cloud) -> None:
        cloud.quota("L-DB2E81BA", 0)
        cloud.quota("L-3819A6DF", 0)
        for spot in (False, True):
            with pytest.raises(LaunchFailed) as failed:
                code.launch(order(instance_type="g5.xlarge", spot=spot))
            assert failed.value.code == "quota"

    @pytest.mark.parametrize(
        ("service", "action"), [("ec2", "RunInstances"), ("ec2", "DescribeImages"), ("ssm", "GetParameter")]
    )
    def test_for_want_of_a_permission_names_it(self, code: AwsBackend, cloud: Cloud, service: str, action: str) -> None:
        cloud.deny(service, action)
        with pytest.raises(LaunchFailed) as failed:
            code.launch(order())
        assert (failed.value.code, failed.value.data["action"]) == ("not_allowed", f"{service}:{action}")

    @pytest.mark.parametrize(
        ("more", "means"),
        [
            ({"ami": "ami-0000000000000000f"}, "ami"),
            ({"subnets": "subnet-0000000000000000f"}, "network"),
            ({"security_groups": "sg-0000000000000000f"}, "network"),
            ({"ssh_key": "nobodys"}, "refused"),
            ({"instance_profile": "nobodys"}, "refused"),
        ],
    )
    def test_of_configured_resources_that_do_not_exist(
        self, backend: Backend, cloud: Cloud, more: dict[str, Any], means: str
    ) -> None:
        with pytest.raises(LaunchFailed) as failed:
            configured(backend, **more).launch(order())
        assert (failed.value.code, cloud.machines()) == (means, [])

    def test_where_no_public_image_has_a_driver_makes_no_call(self, code: AwsBackend, cloud: Cloud) -> None:
        with pytest.raises(LaunchFailed, match="p3") as failed:
            code.launch(order(instance_type="p3.2xlarge"))
        assert (failed.value.code, cloud.count("ssm"), cloud.count("ec2", "RunInstances")) == ("ami", 0, 0)


class TestCalls:
    def test_a_new_order_is_not_looked_for(self, code: AwsBackend, cloud: Cloud) -> None:
        code.launch(order(is_new=True))
        assert (cloud.count("ec2", "DescribeInstances"), cloud.count("ec2", "RunInstances")) == (0, 1)

    def test_one_that_the_rate_limit_has_no_room_for_waits_for_no_turn(
        self, code: AwsBackend, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(rate_limits.RATES, "ec2.RunInstances", rate_limits.RateLimit(0.1, 1))
        code.launch(order())
        with pytest.raises(SourceFailed) as failed:
            code.launch(order())
        assert (failed.value.code, failed.value.data["by"]) == ("throttled", "limiter")
        assert cloud.count("ec2", "RunInstances") == 1

    @pytest.mark.parametrize(
        ("answer", "means"),
        [
            ({"code": "ParameterNotFound", "message": ""}, "ami"),
            (
                {"code": "AccessDeniedException", "message": "not authorized to perform: ssm:GetParameter"},
                "not_allowed",
            ),
        ],
    )
    def test_a_missing_image_is_looked_up_once_for_all_types_and_runs_and_later_again(
        self, code: AwsBackend, cloud: Cloud, monkeypatch: pytest.MonkeyPatch, answer: dict[str, str], means: str
    ) -> None:
        cloud.fail("ssm", "GetParameter", status=400, **answer)
        for instance_type in ("t3.small", "t3.medium", "m5.large", "t3.small"):
            with pytest.raises(LaunchFailed, match=REGION if means == "ami" else "ssm|looked up") as failed:
                code.launch(order(instance_type=instance_type))
            assert failed.value.code == means
            ami.forget()  # as in another process
        assert cloud.count("ssm", "GetParameter") == 1
        now = timezone.now()
        monkeypatch.setattr(timezone, "now", lambda: now + dt.timedelta(seconds=3))
        for _ in range(2):
            with pytest.raises(LaunchFailed):
                code.launch(order())
        assert cloud.count("ssm", "GetParameter") == 2
        cloud.ask("lift", kind="fail", service="ssm", action="GetParameter", region="*")
        monkeypatch.setattr(timezone, "now", lambda: now + dt.timedelta(seconds=60))
        assert code.launch(order()).cloud_id

    def test_a_configured_image_that_is_missing_is_looked_up_once(self, backend: Backend, cloud: Cloud) -> None:
        code = configured(backend, ami="ami-0000000000000000f")
        for _ in range(3):
            with pytest.raises(LaunchFailed) as failed:
                code.launch(order())
            assert failed.value.code == "ami"
        assert cloud.count("ec2", "DescribeImages") == 1


class TestNothingIsConcluded:
    def test_where_it_is_throttled(self, code: AwsBackend, cloud: Cloud) -> None:
        cloud.throttle("ec2", "RunInstances")
        for _ in range(2):
            with pytest.raises(SourceFailed) as failed:
                code.launch(order())
            assert failed.value.code == "throttled"
        assert cloud.count("ec2", "RunInstances") == 1

    def test_where_ec2_is_ill(self, code: AwsBackend, cloud: Cloud) -> None:
        cloud.fail("ec2", "RunInstances")
        with pytest.raises(SourceFailed) as failed:
            code.launch(order())
        assert failed.value.code == "service_error"

    def test_where_the_credentials_are_bad(self, code: AwsBackend, cloud: Cloud) -> None:
        cloud.credentials({})
        for ask in (
            lambda: code.launch(order()),
            lambda: code.instances(REGION, DEPLOYMENT),
            lambda: code.terminate(REGION, ["i-00000000000000001"]),
        ):
            with pytest.raises(SourceFailed) as failed:
                ask()
            assert failed.value.code == "bad_credentials"


class TestEnding:
    def test_a_missing_or_terminated_instance_is_no_error(self, code: AwsBackend, cloud: Cloud) -> None:
        one, two = (code.launch(order()).cloud_id for _ in range(2))
        code.terminate(REGION, [])
        code.terminate(REGION, ["i-00000000000000001"])
        code.terminate(REGION, [one, "i-00000000000000001", two, "i-00000000000000002"])
        for each in (one, two):
            until(code, each, InstanceState.GONE)
        code.terminate(REGION, [one, two])

    def test_many_end_in_few_calls(self, code: AwsBackend, cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(instances, "MAX_IDS", 2)
        monkeypatch.setattr(instances, "PAGE", 5)
        tags = [{"Key": instances.DEPLOYMENT_TAG, "Value": DEPLOYMENT}]
        for _ in range(7):
            cloud.client("ec2").run_instances(
                ImageId=cloud.image(),
                InstanceType="t3.small",
                MinCount=1,
                MaxCount=1,
                TagSpecifications=[{"ResourceType": "instance", "Tags": tags}],
            )
        found = code.instances(REGION, DEPLOYMENT)
        assert (len(found), {each.instance for each in found}) == (7, {""})
        assert cloud.count("ec2", "DescribeInstances") == 2
        code.terminate(REGION, [each.cloud_id for each in found])
        assert cloud.count("ec2", "TerminateInstances") == 4
        assert {each.state for each in code.instances(REGION, DEPLOYMENT)} <= {InstanceState.ENDING, InstanceState.GONE}

    def test_a_manually_stopped_instance_is_listed_until_it_is_terminated(self, code: AwsBackend, cloud: Cloud) -> None:
        started = code.launch(order())
        until(code, started.cloud_id, InstanceState.RUNNING)
        cloud.client("ec2").stop_instances(InstanceIds=[started.cloud_id])
        assert until(code, started.cloud_id, InstanceState.STOPPED).why == "cloud"
        code.terminate(REGION, [started.cloud_id])
        until(code, started.cloud_id, InstanceState.GONE)
