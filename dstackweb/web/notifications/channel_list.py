"""The list of channels, for a person's page and a project's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from dstackweb.lib.errors import DomainError
from dstackweb.notifications import channels
from dstackweb.notifications.models import Channel, Delivery


class ChannelRow(NamedTuple):
    """A channel, where it sends to, and its last delivery."""

    channel: Channel
    to: str
    last: Delivery | None


def list_of(found: Iterable[Channel]) -> list[ChannelRow]:
    return [ChannelRow(channel, address_of(channel), channels.deliveries(channel).first()) for channel in found]


def address_of(channel: Channel) -> str:
    """The host of its URL, or the address of its mails; what is wrong with it where it can't be read."""
    if channel.user is not None and not channel.url:
        return channel.user.email
    try:
        return channels.host_of(channel)
    except DomainError as error:  # stored with another secret key; it can still be deleted
        return error.detail
