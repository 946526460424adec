"""Files as answers to requests: whole or in parts (RFC 9110, section 14), and never run by a browser."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from django.http import HttpRequest, StreamingHttpResponse
from django.utils.http import content_disposition_header

SANDBOX = "sandbox; default-src 'none'"
"""For what jobs wrote, where a browser shows it as a page of its own."""
_RANGE = re.compile(r"bytes=(\d{0,19})-(\d{0,19})")


@dataclass(frozen=True)
class ByteRange:
    """The bytes from `start` to `stop` of a file of `size`; `status` is 206, 200 for all of it, 416 for none."""

    status: int
    start: int
    stop: int
    size: int

    @property
    def headers(self) -> dict[str, str]:
        found = {"Accept-Ranges": "bytes", "Content-Length": str(self.stop - self.start)}
        if self.status == 206:
            found["Content-Range"] = f"bytes {self.start}-{self.stop - 1}/{self.size}"
        elif self.status == 416:
            found["Content-Range"] = f"bytes */{self.size}"
        return found


def part_of(size: int, asked: str, if_range: str, etag: str) -> ByteRange:
    """The part for a `Range` header; all of the file for none, for several parts, and where it has changed."""
    found = _RANGE.fullmatch(asked.strip())
    if found is None or found[1] == found[2] == "" or (if_range and if_range != etag):
        return ByteRange(200, 0, size, size)
    if not found[1]:  # the last bytes
        length = min(int(found[2]), size)
        return ByteRange(206, size - length, size, size) if length else ByteRange(416, 0, 0, size)
    start = int(found[1])
    stop = min(int(found[2]) + 1, size) if found[2] else size
    if found[2] and int(found[2]) < start:
        return ByteRange(200, 0, size, size)
    return ByteRange(206, start, stop, size) if start < size else ByteRange(416, 0, 0, size)


def file_response(
    request: HttpRequest,
    read: Callable[[int, int], Iterator[bytes]],
    *,
    size: int,
    sha256: str,
    name: str,
    image: str = "",
) -> StreamingHttpResponse:
    """A file that a job wrote, or the part that `Range` asks for: to be saved, or shown as the picture that it is.

    `read` gives the bytes from one offset to another; `image` is the type of a picture.
    """
    etag = f'"{sha256}"'
    part = part_of(size, request.headers.get("Range", ""), request.headers.get("If-Range", ""), etag)
    headers = {
        **part.headers,
        "ETag": etag,
        "Content-Disposition": content_disposition_header(not image, name) or "inline",
        "Content-Security-Policy": SANDBOX,
        "X-Content-Type-Options": "nosniff",
        "Cross-Origin-Resource-Policy": "same-origin",
    }
    data = read(part.start, part.stop)
    return StreamingHttpResponse(
        data, status=part.status, content_type=image or "application/octet-stream", headers=headers
    )
