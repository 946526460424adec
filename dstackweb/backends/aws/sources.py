"""What is asked of AWS for a backend, and how offers come from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.utils import timezone

from dstackweb.backends.aws import config, instance_types, offers, prices, public_url, quotas, subnets
from dstackweb.backends.aws.config import AwsConfig
from dstackweb.backends.contract import Offer, SourceFailed, SourceKey, SourceReading
from dstackweb.backends.models import Backend
from dstackweb.lib.errors import DomainError
from dstackweb.spec.effective import Requirements

if TYPE_CHECKING:
    from dstackweb.backends.aws.client import Aws

HOUR_S = 3600.0


class AwsSources:
    """A backend's regions, each with its instance types, prices, spot prices, quotas and, where named, subnets."""

    sources: Mapping[str, float] = {
        "instance_types": 12 * HOUR_S,
        "prices": 12 * HOUR_S,
        "spot_prices": 300.0,
        "quotas": 600.0,
        "subnets": 12 * HOUR_S,
    }

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    @cached_property
    def config(self) -> AwsConfig:
        """As the backend's row says. Raises Invalid."""
        return config.read(self.backend.config)

    def wanted(self) -> list[SourceKey]:
        """All sources of the configured regions."""
        return [
            SourceKey(source, region)
            for region in self.config.regions
            for source in self.sources
            if source != "subnets" or self.config.subnets_in(region)
        ]

    def fetch(self, key: SourceKey) -> Any:
        """Ask AWS: a mapping. Raises SourceFailed."""
        said = self.config
        with self.reached(key.region) as aws:
            match key.source:
                case "instance_types":
                    return instance_types.fetch(aws, said, key.region)
                case "prices":
                    return prices.fetch(aws, said, key.region)
                case "spot_prices":
                    return prices.fetch_spot(aws, said, key.region, timezone.now())
                case "quotas":
                    return quotas.fetch(aws, key.region)
                case "subnets":
                    return subnets.fetch(aws, said, key.region)
        raise LookupError(f"AWS isn't asked for {key.source!r}")

    @contextmanager
    def reached(self, region: str) -> Iterator[Aws]:
        """AWS, as the backend's row says, to ask something of a region. Raises SourceFailed."""
        # Whatever only reads offers, such as the web server, does without boto3 and its memory.
        from dstackweb.backends.aws import client

        try:
            aws = client.aws_of(self.backend)
        except DomainError as error:
            raise SourceFailed("bad_credentials", why="config", region=region, text=error.detail) from error
        try:
            yield aws
        except SourceFailed as failed:
            if failed.code in ("bad_credentials", "no_credentials"):
                client.forget(self.backend)
            raise

    def join(
        self, readings: Mapping[SourceKey, SourceReading], requirements: Requirements, *, image: str | None = None
    ) -> list[Offer]:
        """The offers, the cheapest first. Raises SourceFailed where nothing is known."""
        return offers.join(
            self.config,
            readings,
            requirements,
            backend=self.backend.name,
            image=image,
            url_problem=public_url.find_problem(
                settings.DSTACKWEB_PUBLIC_URL, allow_private=self.config.allow_private_url
            ),
        )
