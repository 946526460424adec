"""What the cloud answers, asked by real boto3 clients over HTTP."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from standins.aws import ACCESS_KEY, REPO, SECRET_KEY, Cloud
from standins.aws.rules import Bucket
from tests.support import eventually

IMAGE = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
G, P5_SPOT = "L-DB2E81BA", "L-C4BD4855"


def error_of(call: Callable[..., Any], **asked: Any) -> tuple[int, str, str]:
    with pytest.raises(ClientError) as raised:
        call(**asked)
    answer = raised.value.response
    return answer["ResponseMetadata"]["HTTPStatusCode"], answer["Error"]["Code"], answer["Error"]["Message"]


def launch(cloud: Cloud, user_data: str | bytes = "", *, region: str = "us-east-1", **more: Any) -> list[str]:
    asked: dict[str, Any] = {
        "ImageId": cloud.image(region),
        "InstanceType": "g5.xlarge",
        "MinCount": 1,
        "MaxCount": 1,
    } | more
    if user_data:
        asked["UserData"] = user_data
    return [instance["InstanceId"] for instance in cloud.client("ec2", region).run_instances(**asked)["Instances"]]


def described(cloud: Cloud, instance_id: str) -> dict[str, Any]:
    found = cloud.client("ec2").describe_instances(InstanceIds=[instance_id])
    return dict(found["Reservations"][0]["Instances"][0])


def state(cloud: Cloud, instance_id: str) -> str:
    return str(described(cloud, instance_id)["State"]["Name"])


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def metadata(cloud: Cloud, instance_id: str, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"{cloud.url}/_instance/{instance_id}/latest/{path}") as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""


SPOT = {"MarketType": "spot", "SpotOptions": {"SpotInstanceType": "one-time"}}


class TestInstanceTypes:
    def test_come_in_pages_with_gpus_and_current_names(self, cloud: Cloud) -> None:
        pages = list(cloud.client("ec2").get_paginator("describe_instance_types").paginate())
        types = {each["InstanceType"]: each for page in pages for each in page["InstanceTypes"]}
        assert len(pages) > 1
        assert {"p5.48xlarge", "p5en.48xlarge", "p4d.24xlarge", "g6.xlarge", "g5.xlarge", "m7i.large"} <= set(types)
        p5 = types["p5.48xlarge"]
        assert p5["VCpuInfo"]["DefaultVCpus"] == 192
        assert p5["GpuInfo"]["Gpus"][0]["Name"] == "H100"
        assert (p5["GpuInfo"]["Gpus"][0]["Count"], p5["GpuInfo"]["Gpus"][0]["MemoryInfo"]["SizeInMiB"]) == (8, 81920)
        assert {"on-demand", "spot"} <= set(p5["SupportedUsageClasses"])

    def test_answer_names_filters_and_unknown_ones(self, cloud: Cloud) -> None:
        ec2 = cloud.client("ec2")
        some = ec2.describe_instance_types(InstanceTypes=["g5.xlarge", "g6.xlarge"])["InstanceTypes"]
        assert {each["InstanceType"] for each in some} == {"g5.xlarge", "g6.xlarge"}
        gs = ec2.describe_instance_types(Filters=[{"Name": "instance-type", "Values": ["g5.*"]}])["InstanceTypes"]
        assert len(gs) == 8
        assert error_of(ec2.describe_instance_types, InstanceTypes=["z9.huge"])[:2] == (400, "InvalidInstanceType")

    def test_a_region_lists_only_its_own_types_with_their_zones(self, cloud: Cloud) -> None:
        ec2 = cloud.client("ec2", "eu-west-1")
        assert error_of(ec2.describe_instance_types, InstanceTypes=["p5.48xlarge"])[1] == "InvalidInstanceType"
        pages = list(
            ec2.get_paginator("describe_instance_type_offerings").paginate(
                LocationType="availability-zone", PaginationConfig={"PageSize": 100}
            )
        )
        found = [(o["InstanceType"], o["Location"]) for page in pages for o in page["InstanceTypeOfferings"]]
        assert len(pages) > 1
        assert len(found) == len(set(found))
        assert ("p4d.24xlarge", "eu-west-1c") in found
        assert ("p4d.24xlarge", "eu-west-1a") not in found

    def test_all_that_moto_knows_on_demand(self, cloud: Cloud) -> None:
        assert cloud.catalog(everything=True) > 1000
        assert cloud.client("ec2").describe_instance_types(InstanceTypes=["u7in-16tb.224xlarge"])["InstanceTypes"]
        cloud.reset()
        assert cloud.catalog(everything=False) < 150


class TestQuotas:
    def test_lie_on_several_pages_in_vcpus_on_demand_and_spot_apart(self, cloud: Cloud) -> None:
        pages = list(cloud.client("service-quotas").get_paginator("list_service_quotas").paginate(ServiceCode="ec2"))
        quotas = {quota["QuotaCode"]: quota for page in pages for quota in page["Quotas"]}
        assert len(pages) >= 3
        assert len(quotas) == sum(len(page["Quotas"]) for page in pages)
        assert quotas["L-1216C47A"]["QuotaName"] == "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances"
        assert quotas["L-3819A6DF"]["QuotaName"] == "All G and VT Spot Instance Requests"
        assert quotas[G]["UsageMetric"]["MetricDimensions"]["Class"] == "G/OnDemand"

    def test_are_set_by_region(self, cloud: Cloud) -> None:
        cloud.quota(G, 8, region="eu-west-1")
        values = [
            cloud.client("service-quotas", region).get_service_quota(ServiceCode="ec2", QuotaCode=G)["Quota"]["Value"]
            for region in ("eu-west-1", "us-east-1")
        ]
        assert values == [8, 64]

    def test_an_unknown_code_or_token_is_refused(self, cloud: Cloud) -> None:
        quotas = cloud.client("service-quotas")
        ask = {"ServiceCode": "ec2"}
        assert error_of(quotas.get_service_quota, **ask, QuotaCode="L-00000000")[1] == "NoSuchResourceException"
        assert error_of(quotas.list_service_quotas, **ask, NextToken="x")[1] == "InvalidPaginationTokenException"


class TestPrices:
    def filters(self, **more: str) -> list[dict[str, str]]:
        usual = {
            "regionCode": "us-east-1", "operatingSystem": "Linux", "tenancy": "Shared", "preInstalledSw": "NA",
            "capacitystatus": "Used",
        }  # fmt: skip
        return [{"Type": "TERM_MATCH", "Field": k, "Value": v} for k, v in {**usual, **more}.items()]

    def price(self, cloud: Cloud, name: str, **more: str) -> float:
        answer = cloud.client("pricing").get_products(
            ServiceCode="AmazonEC2", Filters=self.filters(instanceType=name, **more)
        )
        (product,) = [json.loads(text) for text in answer["PriceList"]]
        assert product["product"]["attributes"]["instanceType"] == name
        (term,) = product["terms"]["OnDemand"].values()
        (dimension,) = term["priceDimensions"].values()
        assert dimension["unit"] == "Hrs"
        return float(dimension["pricePerUnit"]["USD"])

    def test_are_credible(self, cloud: Cloud) -> None:
        usual = {"p5.48xlarge": 98.32, "g5.xlarge": 1.006, "p4d.24xlarge": 32.77, "g6.xlarge": 0.805, "m5.large": 0.096}
        assert {name: self.price(cloud, name) for name in usual} == pytest.approx(usual, rel=0.03)
        assert self.price(cloud, "g5.xlarge", regionCode="eu-west-1") > 1.05
        assert self.price(cloud, "g5.xlarge", capacitystatus="AllocatedCapacityReservation") == 0
        assert self.price(cloud, "g5.xlarge", operatingSystem="Windows") > 1.1

    def test_come_in_pages_one_for_each_type(self, cloud: Cloud) -> None:
        paginator = cloud.client("pricing").get_paginator("get_products")
        pages = list(paginator.paginate(ServiceCode="AmazonEC2", Filters=self.filters()))
        names = [json.loads(t)["product"]["attributes"]["instanceType"] for page in pages for t in page["PriceList"]]
        assert len(pages) == 2
        assert len(names) == len(set(names)) > 100

    def test_spot_is_a_fraction_that_differs_by_zone_and_changes(self, cloud: Cloud) -> None:
        ec2 = cloud.client("ec2")
        now = datetime.now(UTC)
        ask = {"InstanceTypes": ["g5.xlarge"], "ProductDescriptions": ["Linux/UNIX"]}
        today = ec2.describe_spot_price_history(**ask, StartTime=now)["SpotPriceHistory"]
        assert len({row["AvailabilityZone"] for row in today}) == len(today) == 5
        assert len({row["SpotPrice"] for row in today}) == 5
        assert all(0.25 < float(row["SpotPrice"]) / 1.006 < 0.8 for row in today)
        pages = list(
            ec2.get_paginator("describe_spot_price_history").paginate(
                **ask, StartTime=now - timedelta(days=7), EndTime=now, PaginationConfig={"PageSize": 50}
            )
        )
        rows = [row for page in pages for row in page["SpotPriceHistory"]]
        assert len(pages) > 1
        assert len({row["SpotPrice"] for row in rows if row["AvailabilityZone"] == "us-east-1a"}) > 10
        cloud.spot_price("g5.xlarge", 0.9, zone="us-east-1b")
        (row,) = ec2.describe_spot_price_history(**ask, AvailabilityZone="us-east-1b", StartTime=datetime.now(UTC))[
            "SpotPriceHistory"
        ]
        assert float(row["SpotPrice"]) == 0.9


class TestRefusals:
    def test_throttles_by_action_and_region_as_aws_does(self, cloud: Cloud) -> None:
        cloud.throttle(region="us-east-1")
        assert error_of(cloud.client("ec2").describe_instances)[:2] == (503, "RequestLimitExceeded")
        quotas = cloud.client("service-quotas").list_service_quotas
        assert error_of(quotas, ServiceCode="ec2")[:2] == (400, "TooManyRequestsException")
        prices = cloud.client("pricing").get_products
        assert error_of(prices, ServiceCode="AmazonEC2")[:2] == (400, "ThrottlingException")
        assert error_of(cloud.client("sts").get_caller_identity)[:2] == (400, "Throttling")
        assert cloud.client("ec2", "eu-west-1").describe_instances()["Reservations"] == []
        cloud.unthrottle()
        assert cloud.client("ec2").describe_instances()["Reservations"] == []

    def test_a_bucket_lets_through_its_burst_and_then_its_rate(self, cloud: Cloud) -> None:
        regions = cloud.client("ec2").describe_regions
        cloud.throttle("ec2", "DescribeRegions", rate=0, burst=3)
        for _ in range(3):
            regions()
        assert [error_of(regions)[1] for _ in range(2)] == ["RequestLimitExceeded"] * 2
        cloud.client("ec2").describe_instances()
        counted = Counter((call["action"], call["code"]) for call in cloud.calls())
        assert counted == {
            ("DescribeRegions", ""): 3, ("DescribeRegions", "RequestLimitExceeded"): 2, ("DescribeInstances", ""): 1,
        }  # fmt: skip
        bucket, key = Bucket(rate=2, burst=3), ("ec2", "DescribeRegions", "us-east-1")
        times = (0, 0, 0, 0, 0.4, 0.5, 0.6, 1.0, 9, 9, 9, 9)
        passed = [bucket.take(key, at) for at in times]
        assert passed == [True, True, True, False, False, True, False, True, True, True, True, False]

    def test_botocore_retries_throttled_calls(self, cloud: Cloud) -> None:
        cloud.fail("ec2", "DescribeInstances", code="RequestLimitExceeded", status=503, times=1)
        assert cloud.client("ec2", attempts=3).describe_instances()["Reservations"] == []
        assert [call["code"] for call in cloud.calls("ec2")] == ["RequestLimitExceeded", ""]

    def test_access_denied_names_the_action(self, cloud: Cloud) -> None:
        cloud.deny("servicequotas", "ListServiceQuotas")
        cloud.deny("ec2", "RunInstances", "us-east-1")
        status, code, shown = error_of(cloud.client("service-quotas").list_service_quotas, ServiceCode="ec2")
        assert (status, code) == (400, "AccessDeniedException")
        assert "servicequotas:ListServiceQuotas" in shown
        status, code, shown = error_of(launch, cloud=cloud)
        assert (status, code) == (403, "UnauthorizedOperation")
        assert "ec2:RunInstances" in shown
        cloud.allow()
        assert launch(cloud)

    def test_bad_keys_wrong_secrets_and_disabled_regions(self, cloud: Cloud) -> None:
        def made(service: str, key: str, secret: str) -> Any:
            return boto3.client(
                service, region_name="us-east-1", endpoint_url=cloud.url, aws_access_key_id=key,
                aws_secret_access_key=secret, config=Config(retries={"total_max_attempts": 1}),
            )  # fmt: skip

        ask = {"ServiceCode": "ec2"}
        assert error_of(made("ec2", "NOBODYSKEY0000000000", "x").describe_regions)[:2] == (401, "AuthFailure")
        assert error_of(made("ec2", ACCESS_KEY, "wrong").describe_regions)[:2] == (401, "AuthFailure")
        quotas = made("service-quotas", ACCESS_KEY, "wrong")
        assert error_of(quotas.list_service_quotas, **ask)[:2] == (400, "InvalidSignatureException")
        cloud.credentials({})
        quotas = cloud.client("service-quotas")
        assert error_of(quotas.list_service_quotas, **ask)[:2] == (400, "UnrecognizedClientException")
        assert error_of(cloud.client("sts").get_caller_identity)[:2] == (403, "InvalidClientTokenId")
        cloud.reset()
        cloud.region("eu-west-1", enabled=False)
        assert error_of(cloud.client("ec2", "eu-west-1").describe_instances)[1] == "AuthFailure"
        regions = {
            region["RegionName"]: region["OptInStatus"]
            for region in cloud.client("ec2").describe_regions(AllRegions=True)["Regions"]
        }
        assert (regions["eu-west-1"], regions["us-east-1"]) == ("not-opted-in", "opt-in-not-required")

    def test_the_keys_of_an_assumed_role_are_good(self, cloud: Cloud) -> None:
        role = cloud.client("sts").assume_role(
            RoleArn="arn:aws:iam::123456789012:role/dstackweb", RoleSessionName="one"
        )
        keys = role["Credentials"]
        sts = boto3.client(
            "sts", region_name="us-east-1", endpoint_url=cloud.url, aws_access_key_id=keys["AccessKeyId"],
            aws_secret_access_key=keys["SecretAccessKey"], aws_session_token=keys["SessionToken"],
        )  # fmt: skip
        assert sts.get_caller_identity()["Arn"].endswith("assumed-role/dstackweb/one")

    def test_latency_and_counts_with_times(self, cloud: Cloud) -> None:
        cloud.latency(0.2, "ec2", "DescribeRegions")
        began = time.time()
        cloud.client("ec2").describe_regions()
        cloud.client("ec2").describe_instances()
        first, second = cloud.calls("ec2")
        assert (first["action"], first["region"], first["status"]) == ("DescribeRegions", "us-east-1", 200)
        assert first["ms"] >= 200
        assert began <= first["at"] <= second["at"] <= time.time()
        assert (cloud.count("ec2"), cloud.count("pricing"), cloud.count(region="eu-west-1")) == (2, 0, 0)

    def test_dry_runs(self, cloud: Cloud) -> None:
        assert error_of(launch, cloud=cloud, DryRun=True)[:2] == (412, "DryRunOperation")
        assert cloud.machines() == []

    def test_an_unsupported_action_is_an_error_of_its_own(self, cloud: Cloud) -> None:
        assert error_of(cloud.client("pricing").describe_services)[:2] == (400, "UnknownOperationException")


class TestLaunches:
    def test_images_by_public_parameters_have_a_root_device(self, cloud: Cloud) -> None:
        ssm, ec2 = cloud.client("ssm"), cloud.client("ec2")
        plain = "/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-x86_64"
        for name in (IMAGE, plain):
            ami = ssm.get_parameter(Name=name)["Parameter"]["Value"]
            (image,) = ec2.describe_images(ImageIds=[ami])["Images"]
            assert image["RootDeviceName"].startswith("/dev/")
            assert launch(cloud, ImageId=ami)
        named = [{"Name": "name", "Values": ["Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04)*"]}]
        assert len(ec2.describe_images(Owners=["amazon"], Filters=named)["Images"]) == 1
        with pytest.raises(ClientError, match="ParameterNotFound"):
            ssm.get_parameter(Name="/aws/service/deeplearning/ami/x86_64/none/latest/ami-id")
        assert error_of(launch, cloud=cloud, ImageId="ami-00000000000000000")[1] == "InvalidAMIID.NotFound"

    def test_a_client_token_starts_its_instances_once(self, cloud: Cloud) -> None:
        first = launch(cloud, ClientToken="job-1", IamInstanceProfile={})
        assert launch(cloud, ClientToken="job-1", IamInstanceProfile={}) == first
        assert len(cloud.machines()) == 1
        assert error_of(launch, cloud=cloud, ClientToken="job-1", InstanceType="g5.2xlarge")[:2] == (
            400, "IdempotentParameterMismatch",
        )  # fmt: skip
        assert launch(cloud, ClientToken="job-2") != first
        assert launch(cloud, ClientToken="job-1", region="us-west-2") != first
        (found,) = cloud.client("ec2").describe_instances(Filters=[{"Name": "client-token", "Values": ["job-1"]}])[
            "Reservations"
        ]
        assert [instance["InstanceId"] for instance in found["Instances"]] == first

    def test_a_client_token_is_scoped_to_the_requested_zone(self, cloud: Cloud) -> None:
        anywhere = launch(cloud, ClientToken="t")
        in_a, in_b = (
            launch(cloud, ClientToken="t", Placement={"AvailabilityZone": f"us-east-1{zone}"}) for zone in "ab"
        )
        assert len({*anywhere, *in_a, *in_b}) == 3
        assert launch(cloud, ClientToken="t", Placement={"AvailabilityZone": "us-east-1b"}) == in_b
        assert launch(cloud, ClientToken="t") == anywhere

    def test_a_key_pair_has_to_be_there(self, cloud: Cloud) -> None:
        assert error_of(launch, cloud=cloud, KeyName="nobodys")[1] == "InvalidKeyPair.NotFound"

    def test_a_client_token_used_at_the_same_time_starts_its_instances_once(self, cloud: Cloud) -> None:
        got: list[list[str]] = []
        cloud.client("ec2")
        threads = [threading.Thread(target=lambda: got.append(launch(cloud, ClientToken="t"))) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(got) == 6
        assert all(ids == got[0] for ids in got)
        assert len(cloud.machines()) == 1

    def test_a_failed_launch_does_not_use_up_its_client_token(self, cloud: Cloud) -> None:
        cloud.capacity(0, "g5.xlarge")
        assert error_of(launch, cloud=cloud, ClientToken="t")[1] == "InsufficientInstanceCapacity"
        cloud.capacity(None, "g5.xlarge")
        assert launch(cloud, ClientToken="t")

    def test_capacity_by_type_zone_and_market(self, cloud: Cloud) -> None:
        cloud.capacity(0, "g5.xlarge", zone="us-east-1a")
        status, code, shown = error_of(launch, cloud=cloud, Placement={"AvailabilityZone": "us-east-1a"})
        assert (status, code) == (500, "InsufficientInstanceCapacity")
        assert "us-east-1b" in shown
        (elsewhere,) = launch(cloud)
        assert described(cloud, elsewhere)["Placement"]["AvailabilityZone"] == "us-east-1b"
        cloud.capacity(1, "g6.xlarge", market="spot")
        assert launch(cloud, InstanceType="g6.xlarge", InstanceMarketOptions=SPOT)
        shown = error_of(launch, cloud=cloud, InstanceType="g6.xlarge", InstanceMarketOptions=SPOT)
        assert shown[1:] == (
            "InsufficientInstanceCapacity", "There is no Spot capacity available that matches your request.",
        )  # fmt: skip
        assert launch(cloud, InstanceType="g6.xlarge")
        cloud.capacity(None)
        assert launch(cloud, InstanceType="g6.xlarge", InstanceMarketOptions=SPOT)
        assert launch(cloud, Placement={"AvailabilityZone": "us-east-1a"})

    def test_a_subnet_chooses_the_zone_and_a_zone_must_offer_the_type(self, cloud: Cloud) -> None:
        subnets = {
            row["AvailabilityZone"]: row["SubnetId"] for row in cloud.client("ec2").describe_subnets()["Subnets"]
        }
        (there,) = launch(cloud, SubnetId=subnets["us-east-1c"])
        assert described(cloud, there)["Placement"]["AvailabilityZone"] == "us-east-1c"
        assert error_of(launch, cloud=cloud, SubnetId=subnets["us-east-1e"])[1] == "Unsupported"
        assert error_of(launch, cloud=cloud, SubnetId="subnet-00000000")[1] == "InvalidSubnetID.NotFound"
        assert error_of(launch, cloud=cloud, InstanceType="g99.large")[1] == "InvalidParameterValue"

    def test_quotas_count_vcpus_of_running_instances(self, cloud: Cloud) -> None:
        cloud.quota(G, 8)
        ids = launch(cloud, MaxCount=5)
        assert len(ids) == 2
        assert cloud.usage() == {G: 8}
        status, code, shown = error_of(launch, cloud=cloud)
        assert (status, code) == (400, "VcpuLimitExceeded")
        assert "limit of 8" in shown
        cloud.client("ec2").terminate_instances(InstanceIds=ids[:1])
        assert cloud.usage() == {G: 4}
        assert launch(cloud)
        cloud.quota(P5_SPOT, 100)
        assert error_of(launch, cloud=cloud, InstanceType="p5.48xlarge", InstanceMarketOptions=SPOT)[:2] == (
            400, "MaxSpotInstanceCountExceeded",
        )  # fmt: skip

    def test_a_price_below_the_spot_price_is_too_low(self, cloud: Cloud) -> None:
        asked = {"MarketType": "spot", "SpotOptions": {"MaxPrice": "0.01"}}
        assert error_of(launch, cloud=cloud, InstanceMarketOptions=asked)[1] == "SpotMaxPriceTooLow"

    def test_tags_find_instances(self, cloud: Cloud) -> None:
        tags = [{"ResourceType": "instance", "Tags": [{"Key": "dstackweb:job", "Value": "7"}]}]
        (tagged,) = launch(cloud, TagSpecifications=tags, InstanceMarketOptions=SPOT)
        launch(cloud)
        filters = [
            {"Name": "tag:dstackweb:job", "Values": ["7"]},
            {"Name": "instance-state-name", "Values": ["pending", "running"]},
            {"Name": "instance-lifecycle", "Values": ["spot"]},
        ]
        (found,) = cloud.client("ec2").describe_instances(Filters=filters)["Reservations"]
        (instance,) = found["Instances"]
        assert (instance["InstanceId"], instance["InstanceLifecycle"]) == (tagged, "spot")
        assert instance["SpotInstanceRequestId"].startswith("sir-")


class TestMachines:
    def test_user_data_really_runs_in_a_folder_and_environment_of_its_own(self, cloud: Cloud) -> None:
        ask = "import os, urllib.request as u; b = os.environ['AWS_EC2_METADATA_SERVICE_ENDPOINT'];"
        ask += "print(u.urlopen(b + '/latest/meta-data/instance-id').read().decode())"
        (one,) = launch(cloud, f'#!/bin/bash\necho "I am here" > file\nenv | sort\npython3 -c "{ask}"\nexit 3\n')
        assert state(cloud, one) == "pending"
        done = eventually(lambda: (m := cloud.machine(one))["exit"] is not None and m, 5)
        assert done["exit"] == 3
        assert (Path(done["folder"]) / "root" / "file").read_text() == "I am here\n"
        console = done["console"]
        assert one in console.splitlines()
        assert f"HOME={done['folder']}/root" in console
        assert "PYTHONPATH" not in console
        assert "AWS_ACCESS_KEY_ID" not in console
        assert state(cloud, one) == "running"

    def test_packed_user_data_runs_and_too_much_is_refused(self, cloud: Cloud) -> None:
        (one,) = launch(cloud, gzip.compress(b"#!/bin/sh\necho packed\n"))
        eventually(lambda: "packed" in cloud.machine(one)["console"], 5)
        (two,) = launch(cloud, "#cloud-config\n")
        eventually(lambda: "is not run" in cloud.machine(two)["console"], 5)
        assert error_of(launch, cloud=cloud, user_data="#" * 16385)[1] == "InvalidParameterValue"

    @pytest.mark.parametrize("way", ["terminate", "stop"])
    def test_terminating_and_stopping_kill_every_process(self, cloud: Cloud, way: str) -> None:
        cloud.times(grace_s=0.2)
        script = "#!/bin/bash\ntrap '' TERM\n(setsid env -i sleep 300 & echo $! >> pids)\n"
        script += "python3 -c 'import os, time; os.fork() or os.setsid(); os.fork(); "
        script += 'open("pids", "a").write(f"{os.getpid()}\\n"); time.sleep(300)\' & \n'
        script += "echo $$ >> pids\nwait\n"
        (one,) = launch(cloud, script)
        pids = Path(cloud.machine(one)["folder"]) / "root" / "pids"
        found = eventually(lambda: (seen := list(map(int, pids.read_text().split()))) and len(seen) == 6 and seen, 5)
        assert all(alive(pid) for pid in found)
        ec2 = cloud.client("ec2")
        if way == "terminate":
            (shown,) = ec2.terminate_instances(InstanceIds=[one])["TerminatingInstances"]
        else:
            (shown,) = ec2.stop_instances(InstanceIds=[one])["StoppingInstances"]
        assert shown["PreviousState"]["Name"] == "running"
        eventually(lambda: state(cloud, one) == {"terminate": "terminated", "stop": "stopped"}[way], 5)
        assert not any(alive(pid) for pid in found)
        assert described(cloud, one)["StateReason"]["Code"] == "Client.UserInitiatedShutdown"
        assert ec2.terminate_instances(InstanceIds=[one])["TerminatingInstances"]
        assert error_of(ec2.terminate_instances, InstanceIds=["i-00000000000000000"])[1] == "InvalidInstanceID.NotFound"

    def test_sigterm_gives_processes_time_to_exit_cleanly(self, cloud: Cloud) -> None:
        cloud.times(grace_s=10)  # as long as a busy machine may need; it is over as soon as they are gone
        script = "trap 'echo well ended; exit' TERM\necho up\nwhile :; do sleep 0.05; done\n"
        (one,) = launch(cloud, f"#!/bin/bash\n{script}")  # its sleep may get the signal before it does
        eventually(lambda: "up" in cloud.machine(one)["console"], 5)
        cloud.client("ec2").terminate_instances(InstanceIds=[one])
        eventually(lambda: state(cloud, one) == "terminated", 15)
        assert "well ended" in cloud.machine(one)["console"]

    @pytest.mark.parametrize(("behaviour", "ends"), [("terminate", "terminated"), ("stop", "stopped")])
    def test_shutdown_on_the_machine(self, cloud: Cloud, behaviour: str, ends: str) -> None:
        (one,) = launch(
            cloud, "#!/bin/sh\nshutdown -h +60\nshutdown -c\npoweroff\nsleep 300\n",
            InstanceInitiatedShutdownBehavior=behaviour,
        )  # fmt: skip
        eventually(lambda: state(cloud, one) == ends, 5)
        assert described(cloud, one)["StateReason"]["Code"] == "Client.InstanceInitiatedShutdown"

    def test_a_spot_interruption_is_announced_in_advance(self, cloud: Cloud) -> None:
        (one,) = launch(cloud, "#!/bin/sh\nsleep 300\n", InstanceMarketOptions=SPOT)
        eventually(lambda: state(cloud, one) == "running", 5)
        assert metadata(cloud, one, "meta-data/spot/instance-action")[0] == 404
        assert error_of(cloud.client("ec2").stop_instances, InstanceIds=[one])[1] == "UnsupportedOperation"
        cloud.times(shutdown_s=1)
        cloud.interrupt(one, notice_s=1)
        status, shown = metadata(cloud, one, "meta-data/spot/instance-action")
        assert (status, json.loads(shown)["action"]) == (200, "terminate")
        assert state(cloud, one) == "running"
        eventually(lambda: state(cloud, one) == "shutting-down", 5)
        assert described(cloud, one)["StateReason"]["Code"] == "Server.SpotInstanceTermination"
        eventually(lambda: state(cloud, one) == "terminated", 5)
        assert described(cloud, one)["StateReason"]["Code"] == "Server.SpotInstanceTermination"

    def test_metadata_by_token_where_that_is_required(self, cloud: Cloud) -> None:
        (one,) = launch(cloud, "#!/bin/sh\n", MetadataOptions={"HttpTokens": "required"})
        eventually(lambda: state(cloud, one) == "running", 5)
        assert metadata(cloud, one, "meta-data/instance-type")[0] == 401
        base = f"{cloud.url}/_instance/{one}/latest"
        with urllib.request.urlopen(urllib.request.Request(f"{base}/api/token", method="PUT")) as answer:
            token = answer.read().decode()
        asked = urllib.request.Request(f"{base}/meta-data/instance-id", headers={"X-aws-ec2-metadata-token": token})
        with urllib.request.urlopen(asked) as answer:
            assert answer.read().decode() == one

    def test_a_crashed_machine_still_runs_for_aws(self, cloud: Cloud) -> None:
        (one,) = launch(cloud, "#!/bin/sh\necho $$ > pid\nsleep 300\n")
        pid = Path(cloud.machine(one)["folder"]) / "root" / "pid"
        number = eventually(lambda: int(pid.read_text()), 5)
        cloud.crash(one)
        assert not alive(number)
        assert state(cloud, one) == "running"

    def test_a_reset_leaves_nothing(self, cloud: Cloud) -> None:
        (one,) = launch(cloud, "#!/bin/sh\necho $$ > pid\nsleep 300\n")
        folder = Path(cloud.machine(one)["folder"])
        number = eventually(lambda: int((folder / "root" / "pid").read_text()), 5)
        cloud.reset()
        assert not alive(number)
        assert not folder.exists()
        assert cloud.client("ec2").describe_instances()["Reservations"] == []
        assert cloud.count("ec2", "RunInstances") == 0


class TestProcess:
    @pytest.fixture
    def command(self, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
        process = subprocess.Popen(
            [sys.executable, "-m", "standins.aws", "--home", str(tmp_path)],
            cwd=REPO,
            text=True,
            stdout=subprocess.PIPE,
        )
        yield process
        process.kill()
        process.wait()

    @pytest.mark.nightly
    def test_the_command_prints_the_environment_and_its_instances_end_with_it(
        self, command: subprocess.Popen[str]
    ) -> None:
        assert command.stdout
        shown = dict(command.stdout.readline().removeprefix("export ").rstrip().split("=", 1) for _ in range(5))
        assert shown["AWS_ACCESS_KEY_ID"] == ACCESS_KEY
        assert shown["AWS_SECRET_ACCESS_KEY"] == f"'{SECRET_KEY}'"
        cloud = Cloud(shown["AWS_ENDPOINT_URL"], Path(), command)  # type: ignore[arg-type]
        (one,) = launch(cloud, "#!/bin/sh\necho $$ > pid\nsleep 300\n")
        pid = Path(cloud.machine(one)["folder"]) / "root" / "pid"
        number = eventually(lambda: int(pid.read_text()), 5)
        os.kill(command.pid, signal.SIGKILL)
        eventually(lambda: not alive(number), 5)
