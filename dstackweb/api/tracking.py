"""What user code reports with, as one file that Python imports from (docs/tracking.md)."""

from __future__ import annotations

import hashlib
import io
from functools import lru_cache

from django.http import HttpRequest, HttpResponse
from ninja import Router

from dstackweb.runner.pyz import package, write_zip

router = Router(tags=["progress"])
ZIP = {"200": {"description": "OK", "content": {"application/zip": {"schema": {"type": "string", "format": "binary"}}}}}


@router.get("/tracking.zip", auth=None, openapi_extra={"responses": ZIP}, summary="dstackweb.tracking as one file")
def tracking(request: HttpRequest) -> HttpResponse:
    """Put it on `sys.path` or PYTHONPATH, and `from dstackweb.tracking import task, track` works. It holds no secret;
    its `ETag` is its SHA-256."""
    data, sha256 = _zip()
    etag = f'"{sha256}"'
    if request.headers.get("If-None-Match") == etag:
        return HttpResponse(status=304, headers={"ETag": etag})
    return HttpResponse(data, content_type="application/zip", headers={"ETag": etag})


@lru_cache(maxsize=1)
def _zip() -> tuple[bytes, str]:
    """The archive as it was when this process first asked, and its SHA-256 in hex."""
    file = io.BytesIO()
    write_zip(file, package("tracking"))
    return file.getvalue(), hashlib.sha256(file.getvalue()).hexdigest()
