"""Why a file that a job left was not kept, in words."""

from __future__ import annotations

from typing import assert_never

from django.conf import settings
from django.utils.translation import gettext as _

from dstackweb.runner.limits import ArtifactLeft
from dstackweb.runs.artifacts import MOST_FILES, limit_of
from dstackweb.wording import units


def left_out(why: str) -> str:
    """The reason, as the end of a line: "over the limit of 512 MB for a file"."""
    try:
        code = ArtifactLeft(why)
    except ValueError:
        return why
    match code:
        case ArtifactLeft.NAME:
            return _("its name can't be kept: too long, not UTF-8, or with unsafe characters")
        case ArtifactLeft.KIND:
            return _("not a plain file")
        case ArtifactLeft.UNREADABLE:
            return _("could not be read")
        case ArtifactLeft.CHANGED:
            return _("changed while it was sent")
        case ArtifactLeft.TOO_MANY:
            return _("over the limit of %d files for a run") % MOST_FILES
        case ArtifactLeft.TIME:
            return _("not sent in time")
        case ArtifactLeft.UNFINISHED:
            return _("not sent to its end, since its runner was lost")
        case ArtifactLeft.FILE_LIMIT:
            return _("over the limit of %s for a file") % units.size(limit_of(code))
        case ArtifactLeft.RUN_LIMIT:
            return _("over the limit of %s for a run") % units.size(limit_of(code))
        case ArtifactLeft.PROJECT_QUOTA:
            quota = settings.DSTACKWEB_PROJECT_ARTIFACTS_GB
            return _("over the project's quota of %d GB for artifacts") % quota
        case _other:
            assert_never(_other)
