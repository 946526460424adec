"""What an IAM policy for dstackweb has to allow: the one list that the form, the test of a connection and docs show."""

from __future__ import annotations

import json
from collections.abc import Collection

READING = (
    "ec2:DescribeInstanceTypeOfferings",
    "ec2:DescribeInstanceTypes",
    "ec2:DescribeInstances",
    "ec2:DescribeRegions",
    "ec2:DescribeSpotInstanceRequests",
    "ec2:DescribeSpotPriceHistory",
    "ec2:DescribeSubnets",
    "pricing:GetProducts",
    "servicequotas:ListServiceQuotas",
)
STARTING = (
    "ec2:CreateTags",
    "ec2:DescribeImages",
    "ec2:RunInstances",
    "ec2:TerminateInstances",
    "iam:CreateServiceLinkedRole",
    "iam:PassRole",
    "ssm:GetParameter",
)
"""`PassRole` where an instance profile is configured, `CreateServiceLinkedRole` for an account's first spot one."""


def document(actions: Collection[str]) -> str:
    """A policy that allows the actions, as JSON to paste into IAM."""
    statement = {"Effect": "Allow", "Action": sorted(actions), "Resource": "*"}
    return json.dumps({"Version": "2012-10-17", "Statement": [statement]}, indent=2)
