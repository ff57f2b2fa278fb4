"""Who may come in: an ASGI middleware in front of every path, uploads, media and the websocket.

Without a token only a browser on this machine gets in: the server must listen on loopback and be addressed by a
loopback name, past no proxy. In every other case a token is needed; where none was set, one is made and printed once.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

from core.serve.knock import INSTANCE_HEADER, INSTANCE_VARIABLE, TOKEN_VARIABLE
from core.store import default_home
from ui import login_page
from ui.guesses import Guesses
from ui.senders import (
    LOOPBACK,
    Scope,
    client_of,
    has_body,
    headers_of,
    is_cross_site,
    is_https,
    is_local,
    is_opened_page,
)
from ui.sessions import Sessions

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

MAX_BODY_BYTES = 16 * 2**20
"""Of one request; whole files come in slices."""
MAX_FORM_BYTES = 4096
FORM_S = 10.0
"""How long the form with the token may take to arrive."""
CLOSED_PATHS = ("/_stcore/upload_file", "/_stcore/metrics", "/_stcore/agent", "/auth/", "/oauth2callback")
"""What Streamlit serves and the app has no use for: uploads in memory, figures about itself, a way in for programs, and
logins at others."""
_SAFETY: Headers = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),
    (b"content-security-policy", b"frame-ancestors 'self'"),
    (b"x-robots-tag", b"noindex"),
]
_HANG_UP = [(b"connection", b"close")]
"""Else the server would read, and throw away, what is still sent of a body that nobody wants."""
_HTML = [(b"content-type", b"text/html; charset=utf-8"), (b"cache-control", b"no-store")]


class Gate:
    """Let nobody pass without the token, where one is needed; nor a request that another site's page makes.

    Args:
        app: the app behind the gate.
        token: the token; by default the environment's `FINETUNE_TOKEN`.
        address: the address the server listens on; by default Streamlit's `server.address`.
        home: where sessions are remembered; the store's home by default.
    """

    def __init__(
        self, app: App, token: str | None = None, address: str | None = None, home: Path | None = None
    ) -> None:
        self.app = app
        self._token = (os.environ.get(TOKEN_VARIABLE, "") if token is None else token).strip()
        self._is_given = bool(self._token)
        self._address, self._home = address, home
        self._instance = os.environ.get(INSTANCE_VARIABLE, "").encode()
        self._guesses = Guesses()
        self._sessions: Sessions | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            if not self._token and self._listening_address() not in LOOPBACK:
                self._make_token()
            await self.app(scope, receive, send)
            return
        if is_cross_site(scope):
            await self._refuse(scope, receive, send, 403, b"This request came from another site's page.\n")
            return
        # a token that somebody else's request made necessary must not shut out who sits at this machine
        if not self._is_given and self._listening_address() in LOOPBACK and is_local(scope):
            await self._pass(scope, receive, send)
            return
        if not self._token:
            self._make_token()
        number = self.sessions.find(headers_of(scope, b"cookie"))
        if scope["type"] == "http" and await self._is_about_access(scope, receive, send, number):
            return
        if not number:
            await self._refuse(scope, receive, send, 401, login_page.login_page())
            return
        await self._pass(scope, receive, send, number)

    @property
    def sessions(self) -> Sessions:
        """The sessions that were opened with the token."""
        if self._sessions is None:
            self._sessions = Sessions(self._home or default_home(), self._token)
        return self._sessions

    # What the gate answers itself

    async def _is_about_access(self, scope: Scope, receive: Receive, send: Send, number: str) -> bool:
        """Answer a request that brings a token or ends a session."""
        path, method = scope["path"], scope["method"]
        query = parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
        tokens = [value for name, value in query if name == "token"]
        if path == "/logout" and number:
            cookie = self.sessions.end(number, is_https=is_https(scope))
            await self._answer(send, 200, [*_HTML, (b"set-cookie", cookie.encode())], login_page.logged_out())
        elif path == "/login" and method == "POST":
            form = parse_qsl((await _form(receive)).decode("latin-1"), keep_blank_values=True)
            await self._try(scope, send, dict(form).get("token", ""), f"{_base_path()}/", [])
        elif tokens and method == "GET" and (number or is_opened_page(scope)):
            rest = [(name, value) for name, value in query if name != "token"]
            if number:
                await self._redirect(send, path, rest)
            else:
                await self._try(scope, send, tokens[-1], path, rest)
        else:
            return False
        return True

    async def _try(self, scope: Scope, send: Send, given: str, path: str, query: list[tuple[str, str]]) -> None:
        """Open a session where the token is right."""
        client = client_of(scope)
        wait_s = self._guesses.wait_s(client)
        if wait_s > 0:
            headers = [*_HTML, (b"retry-after", str(int(wait_s) + 1).encode())]
            await self._answer(send, 429, headers, login_page.wait(wait_s))
        elif hmac.compare_digest(given.strip().encode(), self._token.encode()):
            self._guesses.note_right(client)
            cookie = self.sessions.open(is_https=is_https(scope))
            await self._redirect(send, path, query, (b"set-cookie", cookie.encode()))
        else:
            self._guesses.note_wrong(client)
            await self._answer(send, 401, _HTML, login_page.wrong_token())

    async def _redirect(
        self, send: Send, path: str, query: list[tuple[str, str]], *headers: tuple[bytes, bytes]
    ) -> None:
        # a path of two slashes would be read as another host
        clean = "/" + quote(path).lstrip("/\\")
        rest = urlencode(query)
        location = f"{clean}?{rest}" if rest else clean
        await self._answer(
            send, 303, [(b"location", location.encode()), (b"cache-control", b"no-store"), *headers], b""
        )

    async def _refuse(self, scope: Scope, receive: Receive, send: Send, status: int, body: bytes) -> None:
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
            return
        await self._answer(send, status, [*_HTML, *(_HANG_UP if has_body(scope) else ())], body)

    async def _answer(self, send: Send, status: int, headers: Headers, body: bytes) -> None:
        instance = [(INSTANCE_HEADER.encode(), self._instance)] if self._instance else []
        length = (b"content-length", str(len(body)).encode())
        await send(
            {"type": "http.response.start", "status": status, "headers": [*headers, *_SAFETY, *instance, length]}
        )
        await send({"type": "http.response.body", "body": body})

    # What goes on to the app

    async def _pass(self, scope: Scope, receive: Receive, send: Send, number: str = "") -> None:
        if scope["type"] == "websocket":
            await self._pass_socket(scope, receive, send, number)
        elif scope["type"] != "http" or scope["path"].removeprefix(_base_path()).startswith(CLOSED_PATHS):
            await self._refuse(scope, receive, send, 404, b"")
        else:
            await self._pass_request(scope, receive, send, is_private=bool(number))

    async def _pass_socket(self, scope: Scope, receive: Receive, send: Send, number: str) -> None:
        """A socket lasts until its session is ended."""
        is_closed = False

        async def close() -> None:
            nonlocal is_closed
            if not is_closed:
                is_closed = True
                await send({"type": "websocket.close", "code": 1008})

        async def heed_receive() -> Message:
            message = await receive()
            if self._holds(number):
                return message
            await close()
            return {"type": "websocket.disconnect", "code": 1008}

        async def heed_send(message: Message) -> None:
            await (send(message) if self._holds(number) else close())

        await self.app(scope, heed_receive, heed_send)

    def _holds(self, number: str) -> bool:
        """Whether the session that a socket was opened in goes on; without a token there is none."""
        return not number or self.sessions.is_open(number)

    async def _pass_request(self, scope: Scope, receive: Receive, send: Send, *, is_private: bool) -> None:
        """A request whose body is no longer than it may be, whatever it says of its length."""
        count, is_answered, is_too_long, is_whole = 0, False, False, not has_body(scope)
        claimed = "".join(headers_of(scope, b"content-length")) or "0"
        if not claimed.isdecimal() or len(claimed) > 20 or int(claimed) > MAX_BODY_BYTES:
            await self._answer(send, 413, [*_HTML, *_HANG_UP], b"")
            return

        async def counted() -> Message:
            nonlocal count, is_too_long, is_whole
            message = await receive()
            count += len(message.get("body", b""))
            is_whole = is_whole or not message.get("more_body")
            if count <= MAX_BODY_BYTES:
                return message
            is_too_long = True
            return {"type": "http.disconnect"}

        async def safe_send(message: Message) -> None:
            nonlocal is_answered
            if is_too_long and not is_answered:
                return
            if message["type"] == "http.response.start":
                is_answered = True
                headers: Headers = list(message.get("headers", []))
                known = {name.lower() for name, _ in headers}
                added = [header for header in _SAFETY if header[0] not in known]
                headers = _private(headers) if is_private else headers
                message = {**message, "headers": [*headers, *added, *(() if is_whole else _HANG_UP)]}
            await send(message)

        try:
            await self.app(scope, counted, safe_send)
        except Exception:
            # the app sees a client that went away
            if not is_too_long:
                raise
        if is_too_long and not is_answered:
            await self._answer(send, 413, [*_HTML, *_HANG_UP], b"")

    def _listening_address(self) -> str:
        if self._address is None:
            from streamlit import config

            self._address = str(config.get_option("server.address") or "0.0.0.0")
        return self._address

    def _make_token(self) -> None:
        from streamlit import config

        self._token, self._sessions = secrets.token_urlsafe(24), None
        host = "localhost" if self._listening_address() in LOOPBACK | {"0.0.0.0", "::"} else self._listening_address()
        port = config.get_option("server.port")
        print(f"Open the dashboard with its token: http://{host}:{port}{_base_path()}/?token={self._token}", flush=True)


def _private(headers: Headers) -> Headers:
    """What a person's session shows must not be kept by a proxy or a tunnel's provider, who would hand it to others."""
    told = b", ".join(value for name, value in headers if name.lower() == b"cache-control")
    words = [word for word in (part.strip() for part in told.split(b",")) if word and word != b"public"]
    if b"no-store" not in words and b"private" not in words:
        words = [b"private", *words]
    others = [header for header in headers if header[0].lower() != b"cache-control"]
    return [*others, (b"cache-control", b", ".join(words))]


def _base_path() -> str:
    """Below which path Streamlit serves everything: "" by default."""
    from streamlit import config

    base = str(config.get_option("server.baseUrlPath")).strip("/")
    return f"/{base}" if base else ""


async def _form(receive: Receive) -> bytes:
    """The beginning of a form; what has come of it where the rest is late."""
    body = b""
    with suppress(TimeoutError):
        async with asyncio.timeout(FORM_S):
            while len(body) <= MAX_FORM_BYTES:
                message = await receive()
                body += message.get("body", b"")
                if message["type"] != "http.request" or not message.get("more_body"):
                    break
    return body[:MAX_FORM_BYTES]
