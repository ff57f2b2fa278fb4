"""What a stranger may try on a dashboard that has a public address, on the real server."""

from __future__ import annotations

import functools
import http.client
import http.server
import json
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.browser import ROOT, Dashboard, chromium_page, dashboard, status_of
from tests.front import HOST, needs_nginx, nginx
from tests.test_browser import WAIT_MS
from tests.test_browser import pytestmark as in_browser
from tests.test_uploads import packed
from ui.gate import CLOSED_PATHS, MAX_BODY_BYTES
from ui.sessions import AGE_S

pytestmark = pytest.mark.long

TOKEN = "open-sesame-of-a-test"
LIST_ROUTES = """
import json, app
found = [(route.path, type(route).__name__) for route in app.app._build_starlette_app().routes]
print(json.dumps(found))
"""
HANDSHAKE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}


@pytest.fixture(autouse=True)
def _streamlit_sets_it_when_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "Agg")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    with dashboard(tmp_path_factory.mktemp("home"), token=TOKEN) as running:
        yield running


@pytest.fixture(scope="module")
def cookie(guarded: Dashboard) -> dict[str, str]:
    """A session of the owner."""
    return {"cookie": status_of(f"{guarded.url}/?token={TOKEN}")[1]["set-cookie"].partition(";")[0]}


def ask(url: str, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    """A request as it stands: nothing of the path is tidied up."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=20)
    try:
        connection.putrequest(method, path, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


@functools.cache
def routes() -> list[str]:
    """Every path that the app or Streamlit serves, with something in place of its parameters."""
    done = subprocess.run(
        [sys.executable, "-c", LIST_ROUTES], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    found = {path for path, _ in json.loads(done.stdout.splitlines()[-1])}
    from streamlit import file_util

    files = sorted(Path(file_util.get_static_dir()).rglob("*"))
    return [
        *(re.sub(r"{\w+(:\w+)?}", "x", path) or "/" for path in found),
        *(f"/{path.relative_to(file_util.get_static_dir()).as_posix()}" for path in files if path.is_file()),
        *("/train", "/live", "/runs", "/runs?run=x", "/timings", "/data", "/system", "/index.html", "/robots.txt"),
        *("/favicon.ico", "/.streamlit/config.toml", "/runs.sqlite", "/access/secret", "/server.log"),
    ]


def test_a_crawl_of_every_route_without_the_token_meets_the_gate_alone(guarded: Dashboard):
    paths = routes()
    assert {"/_stcore/health", "/_stcore/stream", "/_stcore/metrics", "/media/x", "/api/runs/x/series"} <= set(paths)
    methods = ["GET", "HEAD", "OPTIONS", "POST", "PUT", "DELETE"]
    with ThreadPoolExecutor(8) as pool:
        tried = [(method, path) for path in paths for method in (methods if len(path) < 40 else methods[:1])]
        answers = pool.map(lambda one: ask(guarded.url, one[1], one[0]), tried)
        open_ = [(one, status) for one, (status, _, body) in zip(tried, answers, strict=True) if status != 401]
    assert open_ == []
    assert len(tried) > 400


def test_what_the_app_has_no_use_for_is_closed_with_the_token_too(guarded: Dashboard, cookie: dict[str, str]):
    for path in CLOSED_PATHS:
        below = [one for one in routes() if one.startswith(path)]
        assert below, path
        for one in below:
            assert ask(guarded.url, one, **cookie)[0] == 404, one


def test_the_page_for_strangers_asks_nothing_of_the_server(guarded: Dashboard):
    status, headers, body = ask(guarded.url, "/runs?run=x")
    assert status == 401 and b"Token" in body
    for word in (b"streamlit", b"<script", b"<link", b"src=", b"http", b"runs"):
        assert word not in body.lower()
    assert "server" not in headers or "streamlit" not in headers["server"].lower()


def test_a_wrong_token_opens_nothing(guarded: Dashboard):
    wrong = ["wrong", "", TOKEN[:-1], f"{TOKEN}x", TOKEN.upper(), "token-of-another-server", "é" * 5000, f"{TOKEN}\0"]
    for index, token in enumerate(wrong):
        path = f"/?token={urllib.parse.quote(token)}"
        status, headers, _ = ask(guarded.url, path, x_forwarded_for=f"198.51.100.{index}")
        assert status == 401 and "set-cookie" not in headers, token


def test_a_forged_cookie_and_one_of_another_server_open_nothing(
    guarded: Dashboard, cookie: dict[str, str], tmp_path: Path
):
    name, _, value = cookie["cookie"].partition("=")
    number, expires, signature = value.split(".")
    with dashboard(tmp_path, token=TOKEN) as other:
        theirs = status_of(f"{other.url}/?token={TOKEN}")[1]["set-cookie"].partition(";")[0]
    later = int(time.time()) + AGE_S
    for forged in (
        f"{name}={number}.{later}.{signature}",
        f"{name}={number}.{expires}.{'0' * 64}",
        f"{name}={theirs.partition('=')[2]}",
        theirs,
        f"{name}=",
        f'{name}="{number}',
        "\\x00" * 1000,
    ):
        assert ask(guarded.url, "/_stcore/health", cookie=forged)[0] == 401, forged
    assert ask(guarded.url, "/_stcore/health", cookie=cookie["cookie"])[0] == 200


def test_the_websocket_wants_the_cookie_and_the_own_site(guarded: Dashboard, cookie: dict[str, str]):
    def shake(**headers: str) -> int:
        return ask(guarded.url, "/_stcore/stream", **{**HANDSHAKE, **headers})[0]

    assert shake() == 403
    assert shake(cookie="finetune=x", origin=guarded.url) == 403
    for origin in ("https://evil.example", "null", "http://localhost:1", "http://127.0.0.1"):
        assert shake(**cookie, origin=origin) == 403, origin
    assert shake(**cookie, origin=guarded.url) == 101


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_a_request_that_another_sites_page_makes_is_refused_with_the_cookie(
    guarded: Dashboard, cookie: dict[str, str], method: str
):
    for path in ("/_stcore/upload_file/x/y", "/api/uploads", "/login", "/api/runs/x/series"):
        status, _, _ = ask(guarded.url, path, method, origin="https://evil.example", content_length="0", **cookie)
        assert status == 403, path


def test_ten_thousand_guesses_from_one_address_are_answered_and_tried_ten_times(
    guarded: Dashboard, cookie: dict[str, str]
):
    statuses: list[int] = []

    def guess(first: int) -> None:
        # many requests in one piece, as a program would send them that is in a hurry
        with socket.create_connection(("127.0.0.1", int(guarded.url.rsplit(":", 1)[1])), timeout=60) as line:
            for begin in range(first, first + 2500, 100):
                line.sendall(b"".join(_guess(f"guess-{index}") for index in range(begin, begin + 100)))
                got = b""
                while got.count(b"HTTP/1.1 ") < 100 or not got.endswith(b"</html>\n"):
                    got += line.recv(2**20)
                statuses.extend(int(part[:3]) for part in got.split(b"HTTP/1.1 ")[1:])

    threads = [threading.Thread(target=guess, args=(2500 * index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    # the owner works on meanwhile, and can also open another session
    assert ask(guarded.url, "/_stcore/health", **cookie)[0] == 200
    assert ask(guarded.url, f"/?token={TOKEN}", x_forwarded_for="203.0.113.78")[0] == 303
    for thread in threads:
        thread.join()
    assert len(statuses) == 10_000 and set(statuses) == {401, 429}
    assert statuses.count(401) <= 10
    assert ask(guarded.url, f"/?token={TOKEN}", x_forwarded_for="203.0.113.77")[0] == 429


def _guess(token: str) -> bytes:
    return f"GET /?token={token} HTTP/1.1\r\nHost: x\r\nX-Forwarded-For: 203.0.113.77\r\n\r\n".encode()


@pytest.mark.parametrize("has_cookie", [False, True])
def test_two_gigabytes_are_refused_before_they_are_sent(guarded: Dashboard, cookie: dict[str, str], has_cookie: bool):
    for path in ("/_stcore/upload_file/x/y", "/api/uploads", "/login", "/"):
        began = time.monotonic()
        status, _, _ = ask(guarded.url, path, "PUT", content_length=str(2 * 2**30), **(cookie if has_cookie else {}))
        refused = 404 if path.startswith(CLOSED_PATHS) else 413
        assert status == (refused if has_cookie else 401), path
        assert time.monotonic() - began < 10


def test_a_body_without_a_length_is_cut_off(guarded: Dashboard, cookie: dict[str, str]):
    before = _memory(guarded)
    with socket.create_connection(("127.0.0.1", int(guarded.url.rsplit(":", 1)[1])), timeout=20) as line:
        head = (
            f"POST /api/uploads HTTP/1.1\r\nHost: x\r\nCookie: {cookie['cookie']}\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        line.sendall(head.encode())
        sent, piece = 0, b"100000\r\n" + bytes(2**20) + b"\r\n"
        try:
            while sent < 2 * 2**30:
                line.sendall(piece)
                sent += 2**20
        except OSError:
            pass
    # the kernel's buffers hold some of it
    assert sent < 4 * MAX_BODY_BYTES
    assert _memory(guarded) - before < 200 * 2**20


@pytest.mark.parametrize(
    "path",
    [
        "/media/../../../../etc/passwd",
        "/media/%2e%2e/%2e%2e/%2e%2e/etc/passwd",
        "/../runs.sqlite",
        "/static/../../../../etc/passwd",
        "/static/..%2f..%2f..%2fetc/passwd",
        "/app/static/../../.streamlit/config.toml",
        "/component/x/../../../../etc/passwd",
        "/_stcore/bidi-components/x/../../../../etc/passwd",
        "//etc/passwd",
        "/\\..\\..\\etc\\passwd",
        "/api/runs/..%2f..%2fetc/series",
        "/api/uploads/..%2f..%2fetc%2fpasswd",
        "/%00/etc/passwd",
    ],
)
def test_no_path_leads_out_of_what_is_served_even_with_the_token(guarded: Dashboard, cookie: dict[str, str], path: str):
    status, _, body = ask(guarded.url, path, **cookie)
    # Streamlit answers unknown paths with its page
    assert status in (400, 403, 404) or b'<div id="root">' in body
    assert b"root:" not in body and b"SQLite" not in body and b"baseRadius" not in body


def test_the_token_is_in_no_log_and_no_file(guarded: Dashboard, cookie: dict[str, str]):
    ask(guarded.url, f"/live?token={TOKEN}")
    for path in guarded.log.parent.rglob("*"):
        if path.is_file():
            assert TOKEN.encode() not in path.read_bytes(), path
            assert cookie["cookie"].partition("=")[2].encode() not in path.read_bytes(), path
    assert guarded.log.is_file()


def _memory(running: Dashboard) -> int:
    import psutil

    return int(psutil.Process(running.process.pid).memory_info().rss)


EVIL_PAGE = """<!doctype html><title>evil</title><form method=post action="{front}/api/uploads"><input name=a></form>
<script>
window.seen = {{}};
const socket = new WebSocket("{socket}/_stcore/stream");
socket.onopen = () => window.seen.socket = "open";
socket.onerror = () => window.seen.socket = window.seen.socket || "refused";
const post = {{method: "POST", mode: "no-cors"}};
for (const [name, path, options] of [
  ["get", "_stcore/health", {{}}], ["post", "api/uploads", {{...post, body: "x"}}], ["logout", "logout", {{}}],
  ["login", "login", {{...post, body: new URLSearchParams({{token: "x"}})}}],
]) {{
  fetch("{front}/" + path, {{credentials: "include", ...options}})
    .then(async (answer) => window.seen[name] = `${{answer.type}} ${{await answer.text()}}`)
    .catch(() => window.seen[name] = "refused");
}}
</script>"""


@pytest.fixture
def evil() -> Iterator[Any]:
    """Another site; its page is set by the test."""

    class Site(http.server.BaseHTTPRequestHandler):
        page = ""

        def do_GET(self) -> None:
            body = self.page.encode()
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield Site, server.server_port
        server.shutdown()
        thread.join()


@needs_nginx
class TestBehindAnotherHostName:
    pytestmark = in_browser

    def test_the_app_works_there_and_another_sites_page_reaches_nothing(
        self, guarded: Dashboard, evil: Any, tmp_path: Path
    ):
        site, evil_port = evil
        with nginx(tmp_path / "nginx", guarded.url) as front, chromium_page(HOST, "evil.example") as page:
            page.goto(front)
            page.get_by_text("This dashboard needs its token").wait_for(timeout=WAIT_MS)
            page.get_by_label("Token").fill("not this one")
            page.get_by_role("button", name="Open the dashboard").click()
            page.get_by_text("This token is not the one of this dashboard.").wait_for(timeout=WAIT_MS)
            time.sleep(1.0)  # the pause after a first wrong token
            page.goto(f"{front}/live?token={TOKEN}")
            page.get_by_role("link", name="Set up a run").wait_for(timeout=WAIT_MS)
            # no token in the address bar, nor where a script could read it
            assert page.url == f"{front}/live"
            assert TOKEN not in page.evaluate(
                "JSON.stringify([document.cookie, document.referrer, performance.getEntries()])"
            )
            [held] = [one for one in page.context.cookies() if one["name"].startswith("finetune_")]
            assert (held["httpOnly"], held["secure"], held["sameSite"]) == (True, True, "Lax")

            site.page = EVIL_PAGE.format(front=front, socket=front.replace("https", "wss"))
            other = page.context.new_page()
            other.goto(f"http://evil.example:{evil_port}/")
            other.wait_for_function("() => Object.keys(window.seen).length === 5", timeout=WAIT_MS)
            seen = other.evaluate("window.seen")
            assert seen.pop("socket") == "refused"
            assert all(what in ("refused", "opaque ") for what in seen.values()), seen
            other.evaluate("document.forms[0].submit()")
            other.get_by_text("This request came from another site's page.").wait_for(timeout=WAIT_MS)
            # nobody was logged out by it
            page.reload()
            page.get_by_role("link", name="Set up a run").wait_for(timeout=WAIT_MS)

            page.get_by_role("link", name="Log out").click()
            page.get_by_text("You are logged out").wait_for(timeout=WAIT_MS)
            assert [one for one in page.context.cookies() if one["name"].startswith("finetune_")] == []
            page.goto(f"{front}/live")
            page.get_by_text("This dashboard needs its token").wait_for(timeout=WAIT_MS)

    def test_an_upload_comes_through_and_is_looked_at(self, guarded: Dashboard, tmp_path: Path):
        with nginx(tmp_path / "nginx", guarded.url) as front, chromium_page(HOST) as page:
            page.goto(f"{front}/data?token={TOKEN}")
            page.get_by_text("Upload an archive").click()
            page.locator(".upload-choose").wait_for(state="visible", timeout=WAIT_MS)
            archive = {"name": "shades.zip", "mimeType": "application/zip", "buffer": packed()}
            page.set_input_files(".upload-input", archive)
            page.get_by_text("12 files found = 12 used").wait_for(timeout=2 * WAIT_MS)

    def test_a_log_out_in_one_tab_ends_the_other(self, guarded: Dashboard, tmp_path: Path):
        with nginx(tmp_path / "nginx", guarded.url) as front, chromium_page(HOST) as page:
            page.goto(f"{front}/?token={TOKEN}")
            page.get_by_text("Start from").wait_for(timeout=WAIT_MS)
            other = page.context.new_page()
            other.goto(f"{front}/runs")
            other.get_by_role("link", name="Log out").click()
            other.get_by_text("You are logged out").wait_for(timeout=WAIT_MS)
            page.get_by_text("Good defaults").click()
            # its socket is closed, and it can't get another one
            page.get_by_text("Connection error").or_(page.get_by_text("This dashboard needs its token")).or_(
                page.get_by_text("Connecting")
            ).first.wait_for(timeout=WAIT_MS)
