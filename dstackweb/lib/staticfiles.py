"""Static files with their content's hash in the name, so that browsers keep them for good."""

from __future__ import annotations

from whitenoise.storage import CompressedManifestStaticFilesStorage


class HashedStorage(CompressedManifestStaticFilesStorage):  # type: ignore[misc]
    """Also rewrites the imports between our JavaScript modules, which would otherwise mix old and new files."""

    support_js_module_import_aggregation = True
