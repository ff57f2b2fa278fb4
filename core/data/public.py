"""Which web addresses may be asked: any, or where a browser's wishes are served those of the public network alone.

Else an address that a visitor gives would reach what trusts this machine: its own services, its neighbours, and a
cloud's page with the machine's credentials. What is asked is looked at when the connection is made, so neither a
redirect nor a name that leads elsewhere a second later gets past.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import urllib.parse
import urllib.request
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from typing import Any

from core.errors import DataError

ADDRESSES_VARIABLE = "FINETUNE_ADDRESSES"
"""public: those of the public network alone. Anything else, or nothing: any."""
_MAPPED = ipaddress.ip_network("64:ff9b::/96")
"""IPv6 addresses that lead to the IPv4 address in their last 32 bits."""


def open_url(request: urllib.request.Request, timeout_s: float) -> Any:
    """As `urlopen`.

    Raises:
        DataError: the address, or one that it redirects to, is not public, and only those may be asked.
    """
    if os.environ.get(ADDRESSES_VARIABLE) != "public":
        return urllib.request.urlopen(request, timeout=timeout_s)
    return urllib.request.build_opener(_PublicHTTP, _PublicHTTPS).open(request, timeout=timeout_s)


def is_public(address: str) -> bool:
    """Whether an IP address is one of the public network."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo or (None, None))[1]
        if ip in _MAPPED:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    return ip.is_global and not ip.is_multicast


def _refusal(host: str) -> DataError:
    return DataError(
        f"'{host}' is not in the public network, and this dashboard fetches nothing from elsewhere.",
        fix=f"Download the file yourself and give its path, or start the dashboard with {ADDRESSES_VARIABLE}=any.",
    )


def _addresses(host: str, port: int) -> list[tuple[Any, ...]]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    if not all(is_public(str(place[4][0])) for place in found):
        raise _refusal(host)
    return found


def _connect(place: tuple[str, int], timeout: Any, source_address: Any = None) -> socket.socket:
    """As `socket.create_connection`, to the very addresses that were looked at."""
    problem: OSError | None = None
    for family, kind, protocol, _, address in _addresses(*place):
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(timeout)
            connection.connect(address)
            return connection
        except OSError as error:
            connection.close()
            problem = error
    raise problem or OSError("no address")


def _check_behind_proxy(request: urllib.request.Request) -> None:
    """A proxy looks the name up by itself, so what it would find can only be guessed by doing the same."""
    host = urllib.parse.urlsplit(request.full_url).hostname or ""
    try:
        _addresses(host, 0)
    except OSError:
        return  # a name that only the proxy knows


class _PublicConnection(HTTPConnection):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._create_connection = _connect


class _PublicTLSConnection(HTTPSConnection):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._create_connection = _connect


class _PublicHTTP(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> HTTPResponse:
        if req.has_proxy():
            _check_behind_proxy(req)
            return super().http_open(req)
        return self.do_open(_PublicConnection, req)


class _PublicHTTPS(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> HTTPResponse:
        if getattr(req, "_tunnel_host", None):
            _check_behind_proxy(req)
            return super().https_open(req)
        return self.do_open(_PublicTLSConnection, req, context=self._context)  # type: ignore[attr-defined]
