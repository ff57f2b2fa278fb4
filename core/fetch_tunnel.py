"""Fetches cloudflared, which gives the dashboard a public address, where it is missing."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from core.errors import ServeError
from core.files import built

LATEST = "https://github.com/cloudflare/cloudflared/releases/latest/download/"
"""Where Cloudflare's documentation leads to:
https://developers.cloudflare.com/cloudflare-one/connections/connect-networks/downloads/"""
_BUILDS = {"x86_64": "cloudflared-linux-amd64", "aarch64": "cloudflared-linux-arm64"}
_MAGIC = b"\x7fELF"
TIMEOUT_S = 60.0


def fetch_cloudflared(
    folder: Path, environment: Mapping[str, str] = os.environ, *, source: str = LATEST, magic: bytes = _MAGIC
) -> Path:
    """Where cloudflared is: on the PATH, else in `folder`, into which it is fetched where it isn't there.

    Args:
        source: the folder on the web that has the builds.
        magic: what its file begins with: an answer that is no program is not kept.

    Raises:
        ServeError: it can't be fetched.
    """
    found = shutil.which("cloudflared", path=os.pathsep.join([environment.get("PATH", ""), str(folder)]))
    if found is not None:
        return Path(found)
    build = _BUILDS.get(platform.machine()) if sys.platform == "linux" else None
    if build is None:
        raise _failed(f"there is no known build for {sys.platform} on {platform.machine()}")
    target = folder / "cloudflared"
    try:
        with urllib.request.urlopen(f"{source}{build}", timeout=TIMEOUT_S) as answer, built(target) as temporary:
            with temporary.open("wb") as file:
                shutil.copyfileobj(answer, file)
            with temporary.open("rb") as file:
                if file.read(len(magic)) != magic:
                    raise _failed("what came is no program")
            temporary.chmod(0o755)
    except urllib.error.URLError as error:
        raise _failed(str(error.reason)) from error
    except OSError as error:
        raise _failed(error.strerror or str(error)) from error
    return target


def _failed(why: str) -> ServeError:
    return ServeError(
        f"cloudflared can't be fetched from {LATEST}: {why}.",
        fix="Try again, take tunnel ngrok or none, or put cloudflared on the PATH by hand.",
    )
