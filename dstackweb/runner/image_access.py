"""Which projects may use an image that is on this machine: engines ask its registry when it is pulled, and never again.

An image that came with a project's credentials is for the projects whose credentials its registry took; for others it
is not there, so that they ask the registry too. One that was there before, or came without any, is for all. So is one
that is asked for by its digest: no one guesses it, and engines don't ask the registry for what they have by digest.
"""

from __future__ import annotations

import hashlib
import os
import shutil

from dstackweb.runner.images import repository_of

FOLDER = "images"


class ImageAccess:
    """What runners noted of the images of this machine. `home` has the folder of jobs, and is private."""

    def __init__(self, home: str) -> None:
        self._folder = os.path.join(home, FOLDER)

    def allows(self, image: str, image_id: str, project: int) -> bool:
        """Whether a project may use an image by this name without asking its registry."""
        place = self._place(image, image_id)
        return "@" in image or not os.path.isdir(place) or os.path.exists(os.path.join(place, str(project)))

    def note(self, image: str, image_id: str, project: int, *, with_credentials: bool, was_there: bool) -> None:
        """A project has pulled an image; `was_there`: it was on this machine before. Raises OSError."""
        place = self._place(image, image_id)
        if with_credentials and (os.path.isdir(place) or not was_there):
            os.makedirs(place, mode=0o700, exist_ok=True)
            with open(os.path.join(place, str(project)), "w", encoding="ascii"):
                pass
        elif not with_credentials and "@" not in image:
            shutil.rmtree(place, ignore_errors=True)

    def _place(self, image: str, image_id: str) -> str:
        """A folder for an image of a repository, whatever its tag: in another one the same image may be for all."""
        name = f"{repository_of(image)} {image_id}"
        return os.path.join(self._folder, hashlib.sha256(name.encode()).hexdigest())
