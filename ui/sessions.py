"""Sessions of people who gave the token: signed cookies, and which of them logged out.

The key that signs them comes from a secret below the home folder and from the token, so that a session outlives a
restart of the server, ends with another token, and says nothing about the token to who holds the cookie.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable
from pathlib import Path

AGE_S = 30 * 24 * 3600
"""How long a session holds."""
COOKIE_PREFIX = "finetune_"
_log = logging.getLogger(__name__)
_FOLDER, _SECRET, _ENDED = "access", "secret", "logged-out"


class Sessions:
    """Opens, recognises and ends sessions.

    Args:
        home: the folder that holds the secret and the sessions that were ended.
        token: only sessions that were opened with it count.
        now: Unix time.
    """

    def __init__(self, home: Path, token: str, now: Callable[[], float] = time.time) -> None:
        self._folder, self._now = home / _FOLDER, now
        secret = _secret(self._folder)
        self._key = hmac.new(secret, token.encode(), hashlib.sha256).digest()
        # another dashboard under the same host name, on another port say, must not overwrite it
        self._name = f"{COOKIE_PREFIX}{hashlib.sha256(secret).hexdigest()[:8]}"
        self._ended = self._read_ended()

    def open(self, *, is_https: bool) -> str:
        """A Set-Cookie value that opens a session."""
        expires = int(self._now()) + AGE_S
        number = secrets.token_urlsafe(16)
        value = f"{number}.{expires}.{self._sign(number, str(expires))}"
        return f"{self._name}={value}; Path=/; Max-Age={AGE_S}; {_flags(is_https)}"

    def find(self, cookies: Iterable[str]) -> str:
        """The number of the open session that a request's Cookie headers hold; "" where there is none."""
        # SimpleCookie would give up at the first cookie of another program that it can't read, and this host may hold
        # more than one cookie of our name
        for pair in ";".join(cookies).split(";"):
            name, _, value = pair.strip().partition("=")
            if name == self._name and (number := self._number_of(value)):
                return number
        return ""

    def is_open(self, number: str) -> bool:
        """Whether nobody has ended this session."""
        return number not in self._ended

    def end(self, number: str, *, is_https: bool) -> str:
        """End a session for good; returns the Set-Cookie value that removes its cookie."""
        if number:
            expires = int(self._now()) + AGE_S
            self._ended[number] = expires
            path = self._folder / _ENDED
            try:
                with os.fdopen(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600), "w") as file:
                    file.write(f"{number} {expires}\n")
            except OSError:
                # on a full disk it ends all the same, until the server is started again
                _log.warning(
                    "A log-out can't be kept in '%s', and holds until the dashboard ends.", path, exc_info=True
                )
        return f"{self._name}=; Path=/; Max-Age=0; {_flags(is_https)}"

    def _number_of(self, value: str) -> str:
        number, _, rest = value.partition(".")
        expires, _, signature = rest.partition(".")
        if not (expires.isascii() and expires.isdecimal() and len(expires) < 12):
            return ""
        is_ours = hmac.compare_digest(signature.encode(), self._sign(number, expires).encode())
        return number if is_ours and int(expires) > self._now() and self.is_open(number) else ""

    def _sign(self, number: str, expires: str) -> str:
        return hmac.new(self._key, f"{number}.{expires}".encode(), hashlib.sha256).hexdigest()

    def _read_ended(self) -> dict[str, int]:
        try:
            lines = (self._folder / _ENDED).read_text().splitlines()
        except OSError:
            return {}
        pairs = [line.split(" ") for line in lines if line.count(" ") == 1]
        return {number: int(expires) for number, expires in pairs if expires.isdecimal()}


def _flags(is_https: bool) -> str:
    # on a plain http address a browser would not send a Secure cookie back
    return "HttpOnly; SameSite=Lax" + ("; Secure" if is_https else "")


def _secret(folder: Path) -> bytes:
    """The home's secret, made at the first call; only for this process where the folder can't be written."""
    path = folder / _SECRET
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            file.write(secrets.token_bytes(32))
    except FileExistsError:
        pass
    except OSError:
        return secrets.token_bytes(32)
    try:
        held = path.read_bytes()
    except OSError:
        held = b""
    # one that was cut short, or can't be read, protects nothing
    return held if len(held) == 32 else secrets.token_bytes(32)
