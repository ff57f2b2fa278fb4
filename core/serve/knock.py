"""Whether our dashboard answers at an address."""

from __future__ import annotations

import http.client
import http.cookiejar
import urllib.error
import urllib.parse
import urllib.request

LIMIT_S = 10.0
TOKEN_VARIABLE, INSTANCE_VARIABLE = "FINETUNE_TOKEN", "FINETUNE_INSTANCE"
"""By which a server learns its token, and what it is to call itself."""
INSTANCE_HEADER = "x-finetune-instance"
"""Says which start of the launcher a server belongs to, so that it knows its own behind a public address."""
_PAGE_BYTES = 65_536


class _Stay(urllib.request.HTTPRedirectHandler):
    """Redirects are answers of their own."""

    def redirect_request(self, *args: object, **kwargs: object) -> None:
        return None


def is_ours(address: str, instance: str, limit_s: float = LIMIT_S) -> bool:
    """Whether the gate of our own server answers; no token is sent.

    Args:
        address: as "https://name.example", without a path.
        instance: what the server was told to call itself.
    """
    status, headers, _ = _ask(urllib.request.build_opener(_Stay), f"{address}/", limit_s)
    return status == 401 and headers.get(INSTANCE_HEADER) == instance


def shows_page(address: str, token: str, limit_s: float = LIMIT_S) -> bool:
    """Whether the link opens a session and the dashboard's page, all the way that a browser goes."""
    cookies = urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar())
    opener = urllib.request.build_opener(cookies)
    status, headers, body = _ask(opener, link_of(address, token), limit_s)
    return status == 200 and "text/html" in headers.get("content-type", "") and b'id="root"' in body


def link_of(address: str, token: str) -> str:
    """The address with the token in it."""
    return f"{address}/?{urllib.parse.urlencode({'token': token})}"


def _ask(opener: urllib.request.OpenerDirector, url: str, limit_s: float) -> tuple[int, dict[str, str], bytes]:
    """Status, headers by lower-case name, and the body's beginning; status 0 where nothing answers."""
    try:
        with opener.open(urllib.request.Request(url, headers={"user-agent": "finetune-serve"}), timeout=limit_s) as got:
            return got.status, _named(got.headers), got.read(_PAGE_BYTES)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, _named(error.headers), b""
    except (OSError, http.client.HTTPException, ValueError):
        return 0, {}, b""


def _named(headers: object) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}  # type: ignore[attr-defined]
