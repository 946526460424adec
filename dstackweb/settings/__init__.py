"""Django's settings."""

from dstackweb.settings.accounts import *  # noqa: F403  # Django reads them all from this module
from dstackweb.settings.base import *  # noqa: F403  # likewise
from dstackweb.settings.databases import *  # noqa: F403  # likewise
from dstackweb.settings.environment import *  # noqa: F403  # likewise
