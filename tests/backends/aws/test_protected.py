"""Machines whose end somebody has forbidden at AWS's console (termination protection)."""

from __future__ import annotations

from typing import Any

import pytest
from botocore.exceptions import ClientError

from dstackweb.backends.aws import errors, instances
from dstackweb.backends.contract import SourceFailed


class Ec2:
    """Ends nothing in the zone of a protected instance, which here is the only zone."""

    def __init__(self, *protected: str) -> None:
        self.protected = set(protected)
        self.ended: list[str] = []

    def call(self, service: str, region: str, operation: str, **params: Any) -> None:
        asked = params["InstanceIds"]
        if kept := self.protected & set(asked):
            text = f"The instance '{min(kept)}' may not be terminated. Modify its 'disableApiTermination' attribute."
            error = ClientError({"Error": {"Code": "OperationNotPermitted", "Message": text}}, operation)
            raise errors.explained(error, service, operation, region) from error
        self.ended += asked


def test_a_termination_protected_instance_is_an_error_after_the_others_were_terminated() -> None:
    ec2: Any = Ec2("i-2")
    with pytest.raises(SourceFailed, match="'i-2' may not be terminated"):
        instances.terminate(ec2, "eu-west-1", ["i-1", "i-2", "i-3"])
    assert ec2.ended == ["i-1", "i-3"]
    ec2.protected.clear()
    instances.terminate(ec2, "eu-west-1", ["i-2"])
    assert ec2.ended == ["i-1", "i-3", "i-2"]
