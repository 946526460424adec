"""The team's own hosts as a kind of backend: no settings, no price."""

from __future__ import annotations

from dstackweb.backends.hosts.backend import HostsBackend
from dstackweb.backends.kinds import Kind


class HostsKind(Kind):
    """Made by the first start; hosts join it one by one."""

    name = "hosts"
    label = "Own hosts"
    driver_class = HostsBackend
    costs_money = False
    is_hosts = True
