"""Static files as they are served: collected, bundled, and with a hash in their names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.files.base import ContentFile
from whitenoise.storage import CompressedManifestStaticFilesStorage

STYLES, SCRIPT = "site.css", "app.js"
"""What each page loads."""


def page_sources() -> list[Path]:
    """The files whose words may be classes or variables that pages use."""
    assets = Path(settings.ASSETS_DIR)
    patterns = ("templates/**/*.html", "static/js/*.js", "static/*.js", "static/*.css")
    sources = {path for pattern in patterns for path in assets.glob(pattern)} - {assets / "static" / STYLES}
    return sorted(sources.union(Path(__file__).parents[1].glob("web/**/*.py")))


class HashedStorage(CompressedManifestStaticFilesStorage):  # type: ignore[misc]  # whitenoise has no types
    """Static files with a hash of their content in the name, so that browsers cache them forever.

    `site.css` and `app.js` have all that they import in them (`lib.bundles`), so that a page needs few requests.
    """

    def post_process(self, paths: dict[str, Any], dry_run: bool = False, **options: Any) -> Iterator[Any]:
        if not dry_run:
            paths = self._bundled(paths)
        yield from super().post_process(paths, dry_run, **options)

    def _bundled(self, paths: dict[str, Any]) -> dict[str, Any]:
        """The files to be served, with both bundles in the place of their parts."""
        parts = set()

        def read(path: str) -> str:
            parts.add(path)
            storage, name = paths[path]
            with storage.open(name) as source:
                return bytes(source.read()).decode()

        from dstackweb.lib import bundles  # late: no process but the one that collects static files parses CSS

        used = bundles.words(path.read_text() for path in page_sources())
        made = {STYLES: bundles.stylesheet(STYLES, read, used), SCRIPT: bundles.script(SCRIPT, read)}
        for name, text in made.items():
            self.delete(name)
            self._save(name, ContentFile(text.encode()))
        return {path: where for path, where in paths.items() if path not in parts} | {
            name: (self, name) for name in made
        }
