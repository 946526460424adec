"""AWS's regions with the names of places, for people who choose some: those of the ordinary partition.

Others (China, GovCloud, newer ones) are typed in. The list is botocore's, kept here since the web server has no boto3.
"""

from __future__ import annotations

from collections.abc import Mapping

REGIONS: Mapping[str, Mapping[str, str]] = {
    "North America": {
        "us-east-1": "N. Virginia",
        "us-east-2": "Ohio",
        "us-west-1": "N. California",
        "us-west-2": "Oregon",
        "ca-central-1": "Montreal",
        "ca-west-1": "Calgary",
        "mx-central-1": "Mexico",
    },
    "Europe": {
        "eu-west-1": "Ireland",
        "eu-west-2": "London",
        "eu-west-3": "Paris",
        "eu-central-1": "Frankfurt",
        "eu-central-2": "Zurich",
        "eu-north-1": "Stockholm",
        "eu-south-1": "Milan",
        "eu-south-2": "Spain",
    },
    "Asia and Pacific": {
        "ap-northeast-1": "Tokyo",
        "ap-northeast-2": "Seoul",
        "ap-northeast-3": "Osaka",
        "ap-east-1": "Hong Kong",
        "ap-east-2": "Taipei",
        "ap-south-1": "Mumbai",
        "ap-south-2": "Hyderabad",
        "ap-southeast-1": "Singapore",
        "ap-southeast-2": "Sydney",
        "ap-southeast-3": "Jakarta",
        "ap-southeast-4": "Melbourne",
        "ap-southeast-5": "Malaysia",
        "ap-southeast-6": "New Zealand",
        "ap-southeast-7": "Thailand",
    },
    "Elsewhere": {
        "sa-east-1": "São Paulo",
        "af-south-1": "Cape Town",
        "il-central-1": "Tel Aviv",
        "me-central-1": "UAE",
        "me-south-1": "Bahrain",
    },
}
"""By part of the world: each region's code and its place."""

NAMES: Mapping[str, str] = {code: place for part in REGIONS.values() for code, place in part.items()}
