"""What an IAM policy for dstackweb has to allow: the one list that the form, the test of a connection and docs show."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

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
    "ssm:GetParameter",
)
"""An account's first spot instance has AWS make a role of its own for that."""
PASSING = ("iam:PassRole",)
"""Where an instance profile is configured."""

_LIMITED: Mapping[str, Mapping[str, Any]] = {
    "iam:CreateServiceLinkedRole": {
        "Resource": "arn:aws:iam::*:role/aws-service-role/spot.amazonaws.com/*",
        "Condition": {"StringEquals": {"iam:AWSServiceName": "spot.amazonaws.com"}},
    },
    "iam:PassRole": {
        "Resource": "arn:aws:iam::*:role/THE-PROFILES-ROLE",
        "Condition": {"StringEquals": {"iam:PassedToService": "ec2.amazonaws.com"}},
    },
}
"""Whoever may pass or make any role can do what that role can: these are for one only."""


def document(actions: Collection[str]) -> str:
    """A policy that allows the actions, as JSON to paste into IAM."""
    plain = sorted(set(actions) - set(_LIMITED))
    statements: list[Mapping[str, Any]] = [{"Effect": "Allow", "Action": plain, "Resource": "*"}] if plain else []
    statements += [
        {"Effect": "Allow", "Action": action, **limits} for action, limits in _LIMITED.items() if action in actions
    ]
    return json.dumps({"Version": "2012-10-17", "Statement": statements}, indent=2)
