"""Static files with a hash of their content in the name, so that browsers cache them forever."""

from __future__ import annotations

from whitenoise.storage import CompressedManifestStaticFilesStorage


class HashedStorage(CompressedManifestStaticFilesStorage):  # type: ignore[misc]
    """Also rewrites imports between JavaScript modules; otherwise pages would mix old and new files."""

    support_js_module_import_aggregation = True
