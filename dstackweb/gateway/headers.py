"""The headers of proxied requests: what the job gets of a request, and a caller of an answer. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from multidict import CIMultiDict, CIMultiDictProxy

from dstackweb.runs import connections

HOP_BY_HOP = {
    "connection", "expect", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te",
    "trailer", "transfer-encoding", "upgrade",
}  # fmt: skip
TOKEN = "X-Dstackweb-Token"  # noqa: S105  # a header's name
"""For services that use `Authorization` themselves."""
PROBLEM = "X-Dstackweb-Problem"
"""On answers that are the gateway's own (`GatewayProblem`)."""
USER = "X-Forwarded-User"
OWN = {
    "content-length", "cookie", "forwarded", "host", TOKEN.lower(), USER.lower(), "x-forwarded-for", "x-forwarded-host",
    "x-forwarded-port", "x-forwarded-proto", "x-real-ip",
}  # fmt: skip
"""Those of a request that the gateway writes anew, or keeps."""
TOKENS = "Bearer dw_"
"""How the value of `Authorization` with an API token begins."""


def token_of(headers: Mapping[str, str]) -> str | None:
    """The API token of a request; None without one. A bearer token of another kind is the service's own."""
    if (found := headers.get(TOKEN)) is not None:
        return found.strip()
    return headers["Authorization"][len("Bearer ") :].strip() if _has_token(headers.get("Authorization", "")) else None


def _has_token(value: str) -> bool:
    return value[: len(TOKENS)].lower() == TOKENS.lower()


def is_own(headers: Mapping[str, str], method: str, origin: str) -> bool:
    """Whether a request is of the run's own pages, or of a person who follows a link; and not of a page of elsewhere.

    Browsers say it in Fetch Metadata on https and on localhost; else only in the origin of what may change something.
    """
    site = headers.get("Sec-Fetch-Site", "same-origin")
    if site not in ("same-origin", "none"):
        return method == "GET" and headers.get("Sec-Fetch-Mode") == "navigate" and _is_page(headers)
    return headers.get("Origin", origin) == origin


def _is_page(headers: Mapping[str, str]) -> bool:
    return headers.get("Sec-Fetch-Dest") == "document"


def request_headers(
    headers: CIMultiDictProxy[str], address: str, host: str, scheme: str, user: str
) -> CIMultiDict[str]:
    """What the job gets of a request's headers: nothing of this connection, and no cookie or token of the gateway.

    `user` is who the gateway has let in.
    """
    dropped = {word.strip().lower() for word in headers.get("Connection", "").split(",")} | HOP_BY_HOP | OWN
    found = CIMultiDict(
        (name, value)
        for name, value in headers.items()
        if name.lower() not in dropped and not (name.lower() == "authorization" and _has_token(value))
    )
    if cookies := without_cookie("; ".join(headers.getall("Cookie", [])), connections.cookie_name()):
        found["Cookie"] = cookies
    found["Host"] = found["X-Forwarded-Host"] = host
    found["X-Forwarded-For"], found["X-Forwarded-Proto"], found[USER] = address, scheme, user
    if "Content-Length" in headers:
        found["Content-Length"] = headers["Content-Length"]
    return found


def without_cookie(cookies: str, name: str) -> str:
    pairs = [pair.strip() for pair in cookies.split(";")]
    return "; ".join(pair for pair in pairs if pair and pair.partition("=")[0].strip() != name)


def response_headers(headers: CIMultiDictProxy[str]) -> Iterator[tuple[str, str]]:
    """What a caller gets of an answer's headers: no cookie that reaches beyond this host name."""
    dropped = {word.strip().lower() for word in headers.get("Connection", "").split(",")} | HOP_BY_HOP
    dropped |= {"strict-transport-security", PROBLEM.lower()}
    for name, value in headers.items():
        if name.lower() in dropped:
            continue
        if name.lower() == "set-cookie":
            parts = [part.strip() for part in value.split(";")]
            if parts[0].partition("=")[0].strip() == connections.cookie_name():
                continue
            value = "; ".join(part for part in parts if not part.lower().startswith("domain"))
        yield name, value
