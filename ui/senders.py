"""What a request tells of who sends it, and from where: its headers, which a stranger may write as well."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any
from urllib.parse import urlsplit

Scope = MutableMapping[str, Any]

LOOPBACK = {"127.0.0.1", "localhost", "::1"}
SAFE_METHODS = {"GET", "HEAD", "OPTIONS"}
_PROXY_HEADERS = ("forwarded", "via", "x-real-ip", "x-forwarded-", "x-original-", "cf-")
"""How the headers begin that proxies and tunnels add."""


def headers_of(scope: Scope, name: bytes) -> list[str]:
    """The values of all headers of this name."""
    return [value.decode("latin-1") for key, value in scope.get("headers", []) if key.lower() == name]


def has_body(scope: Scope) -> bool:
    """Whether more follows than the headers."""
    lengths = headers_of(scope, b"content-length")
    return bool(headers_of(scope, b"transfer-encoding")) or any(length != "0" for length in lengths)


def is_cross_site(scope: Scope) -> bool:
    """Whether a page of another site makes this request, and it could do something.

    Browsers name the page's origin with every websocket and every request that isn't safe; what names none comes from
    no page. Without this check any page that a person visits could command a dashboard on the person's own machine.
    """
    is_socket = scope["type"] == "websocket"
    if scope["type"] == "http" and scope["method"] in SAFE_METHODS and scope["path"] != "/logout":
        return False
    # "same-site" is another port of this host, or a neighbour below the same domain
    if not is_socket and headers_of(scope, b"sec-fetch-site")[:1] in (["cross-site"], ["same-site"]):
        return True
    hosts = {host.lower() for host in headers_of(scope, b"host")}
    return any(
        urlsplit(origin.lower()).netloc not in hosts and not _is_allowed(origin)
        for origin in headers_of(scope, b"origin")
    )


def is_opened_page(scope: Scope) -> bool:
    """Whether a person opens a page, as far as the browser says; not a picture or a frame in another site's page.

    Else such a page could try wrong tokens in its visitor's name until the visitor is locked out.
    """
    return headers_of(scope, b"sec-fetch-dest")[:1] in ([], ["document"])


def is_local(scope: Scope) -> bool:
    """Whether the request reached a loopback socket under a loopback name, and no proxy says that it was in between."""
    server = scope.get("server")
    if server is not None and server[0] not in LOOPBACK:
        return False
    if any(key.decode("latin-1").lower().startswith(_PROXY_HEADERS) for key, _ in scope.get("headers", [])):
        return False
    hosts = headers_of(scope, b"host")
    return bool(hosts) and all(_host_name(host) in LOOPBACK for host in hosts)


def is_https(scope: Scope) -> bool:
    """Whether the browser speaks https, to us or to a proxy."""
    return "https" in (*headers_of(scope, b"x-forwarded-proto"), scope.get("scheme"))


def client_of(scope: Scope) -> str:
    """The client's address: as the last proxy tells it where that one runs on this machine, as a tunnel does."""
    address = str((scope.get("client") or ("",))[0])
    if address in LOOPBACK:
        forwarded = ",".join(headers_of(scope, b"x-forwarded-for")).split(",")
        # who is further left was named by the client itself, who may say anything
        return forwarded[-1].strip() or address
    return address


def _is_allowed(origin: str) -> bool:
    """Whether Streamlit's option server.corsAllowedOrigins names it, for proxies that write another Host."""
    from streamlit import config

    return origin in config.get_option("server.corsAllowedOrigins")


def _host_name(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if ":" in host else host
