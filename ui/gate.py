"""Who may come in: an ASGI middleware in front of every path, uploads, media and the websocket.

Without a token only a browser on this machine gets in: the server must listen on loopback and be addressed by a
loopback name. In every other case a token is needed; where none was set, one is made and printed once.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

TOKEN_VARIABLE = "FINETUNE_TOKEN"
COOKIE = "finetune_gate"
COOKIE_AGE_S = 30 * 24 * 3600
WRONG_TOKEN_DELAY_S = 0.5
LOOPBACK = {"127.0.0.1", "localhost", "::1"}


class Gate:
    """Let nobody pass without the token, where one is needed.

    Args:
        app: the app behind the gate.
        token: the token; by default the environment's `FINETUNE_TOKEN`.
        address: the address the server listens on; by default Streamlit's `server.address`.
    """

    def __init__(self, app: App, token: str | None = None, address: str | None = None) -> None:
        self.app = app
        self._token = (os.environ.get(TOKEN_VARIABLE, "") if token is None else token).strip()
        self._address = address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            if not self._token and self._listening_address() not in LOOPBACK:
                self._make_token()
            await self.app(scope, receive, send)
            return
        if not self._token:
            if self._listening_address() in LOOPBACK and _is_local(scope):
                await self.app(scope, receive, send)
                return
            self._make_token()
        query = parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
        given = dict(query).get("token") if scope.get("method") == "GET" else None
        if self._has_cookie(scope):
            if given is not None:
                await self._redirect(scope, send, query, cookie=False)
                return
            await self.app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
            return
        if given is not None:
            if hmac.compare_digest(given.encode(), self._token.encode()):
                await self._redirect(scope, send, query, cookie=True)
                return
            await asyncio.sleep(WRONG_TOKEN_DELAY_S)
        await _answer(
            send,
            401,
            [(b"content-type", b"text/plain; charset=utf-8")],
            b"This dashboard needs its token. Open the address that it printed at its start, with ?token= in it.\n",
        )

    def _listening_address(self) -> str:
        if self._address is None:
            from streamlit import config

            self._address = str(config.get_option("server.address") or "0.0.0.0")
        return self._address

    def _make_token(self) -> None:
        from streamlit import config

        self._token = secrets.token_urlsafe(24)
        host = "localhost" if self._listening_address() in LOOPBACK | {"0.0.0.0", "::"} else self._listening_address()
        port = config.get_option("server.port")
        print(f"Open the dashboard with its token: http://{host}:{port}/?token={self._token}", flush=True)

    def _sign(self, expires: str) -> str:
        return hmac.new(self._token.encode(), f"{COOKIE}.{expires}".encode(), hashlib.sha256).hexdigest()

    def _has_cookie(self, scope: Scope) -> bool:
        for raw in _headers(scope, b"cookie"):
            try:
                morsel = SimpleCookie(raw).get(COOKIE)
            except CookieError:
                continue
            if morsel is None:
                continue
            expires, _, signature = morsel.value.partition(".")
            is_signed = hmac.compare_digest(signature.encode(), self._sign(expires).encode())
            if is_signed and expires.isdecimal() and int(expires) > time.time():
                return True
        return False

    async def _redirect(self, scope: Scope, send: Send, query: list[tuple[str, str]], *, cookie: bool) -> None:
        # a path of two slashes would be read as another host
        path = "/" + quote(scope["path"]).lstrip("/")
        rest = urlencode([(name, value) for name, value in query if name != "token"])
        headers = [
            (b"location", (f"{path}?{rest}" if rest else path).encode()),
            (b"cache-control", b"no-store"),
            (b"referrer-policy", b"no-referrer"),
        ]
        if cookie:
            expires = str(int(time.time()) + COOKIE_AGE_S)
            value = f"{COOKIE}={expires}.{self._sign(expires)}; Path=/; Max-Age={COOKIE_AGE_S}; HttpOnly; SameSite=Lax"
            if "https" in (*_headers(scope, b"x-forwarded-proto"), scope.get("scheme")):
                value += "; Secure"
            headers.append((b"set-cookie", value.encode()))
        await _answer(send, 303, headers, b"")


def _headers(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope.get("headers", []) if key.lower() == name]


def _is_local(scope: Scope) -> bool:
    """Whether the request reached a loopback socket under a loopback name."""
    server = scope.get("server")
    if server is not None and server[0] not in LOOPBACK:
        return False
    hosts = _headers(scope, b"host")
    return bool(hosts) and all(_host_name(host) in LOOPBACK for host in hosts)


def _host_name(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if ":" in host else host


async def _answer(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    headers = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
