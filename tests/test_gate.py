"""The gate: what passes it, and what it answers itself. The attacks on a real server are in test_attacks.py."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocket, WebSocketDisconnect

from ui.gate import MAX_BODY_BYTES, Gate
from ui.guesses import FIRST_PAUSE_S, LOCKED_AFTER, LOCKED_S, MAX_CLIENTS, Guesses, network_of
from ui.sessions import AGE_S, Sessions

TOKEN = "open-sesame"


@pytest.fixture(autouse=True)
def _streamlit_sets_it_when_its_options_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "Agg")


async def _echo(socket: WebSocket) -> None:
    await socket.accept()
    with suppress(WebSocketDisconnect):
        while True:
            await socket.send_text(await socket.receive_text())


async def _page(request: Request) -> PlainTextResponse:
    body = await request.body()
    return PlainTextResponse(f"{request.url.query}{len(body) or ''}")


def _inner() -> Starlette:
    return Starlette(
        routes=[
            WebSocketRoute("/socket", _echo),
            Route("/{path:path}", _page, methods=["GET", "POST", "PUT", "DELETE"]),
        ]
    )


class Visitor:
    """Makes clients of one gate; each has cookies of its own."""

    def __init__(self, home: Path, token: str = TOKEN, address: str = "127.0.0.1") -> None:
        self.gate = Gate(_inner(), token=token, address=address, home=home)

    def __call__(self, base_url: str = "http://localhost", client: str = "127.0.0.1") -> TestClient:
        return TestClient(self.gate, base_url=base_url, follow_redirects=False, client=(client, 50000))


@pytest.fixture
def visitor(tmp_path: Path) -> Visitor:
    return Visitor(tmp_path)


@contextmanager
def logged_in(visitor: Visitor, **options: Any) -> Iterator[TestClient]:
    client = visitor(**options)
    assert client.get(f"/?token={TOKEN}").status_code == 303
    yield client


class TestWithoutTheToken:
    @pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST", "PUT", "DELETE", "PATCH", "TRACE"])
    @pytest.mark.parametrize("path", ["/", "/live", "/_stcore/health", "/media/x.png", "/api/runs/x/series", "//live"])
    def test_every_path_is_401(self, visitor: Visitor, method: str, path: str):
        answer = visitor().request(method, path)
        assert answer.status_code == 401 and answer.headers["cache-control"] == "no-store"

    def test_uploads_and_a_wrong_token_are_401(self, visitor: Visitor):
        assert visitor().put("/_stcore/upload_file/a/b", content=b"x").status_code == 401
        assert visitor().post(f"/?token={TOKEN}").status_code == 401
        for number, wrong in enumerate(["wrong", "", "%C3%A9", TOKEN[:-1], f"{TOKEN}x", TOKEN.upper()]):
            client = visitor(client=f"192.0.2.{number}")
            assert client.get(f"/?token={wrong}").status_code == 401

    def test_the_websocket_is_refused(self, visitor: Visitor):
        with pytest.raises(WebSocketDisconnect) as caught, visitor().websocket_connect("ws://localhost/socket"):
            pass
        assert caught.value.code == 1008

    def test_an_unknown_kind_of_connection_does_not_pass(self, tmp_path: Path):
        seen: list[str] = []

        async def inner(scope: Any, receive: Any, send: Any) -> None:
            seen.append("passed")

        async def send(message: Any) -> None:
            seen.append(str(message.get("status", "")))

        async def receive() -> Any:
            return {"type": "other"}

        gate = Gate(inner, token=TOKEN, home=tmp_path)
        asyncio.run(gate({"type": "other", "headers": [], "path": "/"}, receive, send))
        assert seen[0] == "401"

    def test_the_page_asks_for_it_and_names_nothing_of_the_app(self, visitor: Visitor):
        page = visitor().get("/runs?run=secret-run").text
        assert '<form method="post" action="/login">' in page
        assert "streamlit" not in page.lower() and "secret-run" not in page


class TestOpeningASession:
    def test_the_link_gives_a_cookie_and_the_clean_address(self, visitor: Visitor):
        client = visitor()
        answer = client.get(f"/live?run=a&token={TOKEN}")
        assert (answer.status_code, answer.headers["location"]) == (303, "/live?run=a")
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=Lax" in cookie and "Secure" not in cookie and TOKEN not in cookie
        assert client.get("/live?run=a").text == "run=a"
        with client.websocket_connect("ws://localhost/socket") as socket:
            socket.send_text("hello")
            assert socket.receive_text() == "hello"

    def test_the_form_gives_one_too(self, visitor: Visitor):
        client = visitor()
        answer = client.post("/login", data={"token": f" {TOKEN}\n"})
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        assert client.get("/live").status_code == 200

    def test_a_form_without_an_end_is_not_read_to_it(self, visitor: Visitor):
        assert visitor().post("/login", content=b"token=" + b"x" * 10_000_000).status_code == 401

    def test_the_cookie_is_secure_behind_https(self, visitor: Visitor):
        answer = visitor().get(f"/?token={TOKEN}", headers={"x-forwarded-proto": "https"})
        assert answer.headers["set-cookie"].endswith("; Secure")

    @pytest.mark.parametrize("path", ["//evil.example/", "/%5Cevil.example/", "/\\evil.example"])
    def test_the_clean_address_never_names_another_host(self, visitor: Visitor, path: str):
        answer = visitor().get(f"http://localhost{path}?token={TOKEN}")
        location = answer.headers["location"]
        assert answer.status_code == 303 and location[0] == "/" and location[1] not in "/\\"

    def test_with_a_session_a_token_in_the_address_is_taken_out_of_it(self, visitor: Visitor):
        with logged_in(visitor) as client:
            answer = client.get("/live?run=a&token=of-another-server")
            assert (answer.status_code, answer.headers["location"]) == (303, "/live?run=a")


class TestSessions:
    def test_a_forged_cookie_opens_nothing(self, tmp_path: Path):
        now = 1_000_000.0
        sessions = Sessions(tmp_path, TOKEN, now=lambda: now)
        good = sessions.open(is_https=False).partition(";")[0]
        name, _, value = good.partition("=")
        number, expires, signature = value.split(".")
        assert sessions.find([good]) == number
        for forged in (
            f"{number}.{expires}.{'0' * 64}",
            f"{number}.{int(expires) + 1}.{signature}",
            f"other.{expires}.{signature}",
            f"{number}.{expires}",
            f"{number}.{expires}.",
            f"..{signature}",
            f"{number}.-1.{signature}",
            f"{number}.{expires}.{signature}x",
            f"{number}.{'9' * 400}.{signature}",
            "",
            "\xff",
        ):
            assert sessions.find([f"{name}={forged}"]) == "", forged
        assert sessions.find([f"other={value}"]) == ""
        now += AGE_S + 1
        assert sessions.find([good]) == ""

    def test_a_session_of_another_token_or_another_home_does_not_count(self, tmp_path: Path):
        good = Sessions(tmp_path / "a", TOKEN).open(is_https=True).partition(";")[0]
        assert Sessions(tmp_path / "a", TOKEN).find([good])
        assert not Sessions(tmp_path / "a", "another").find([good])
        name = good.partition("=")[0]
        other = Sessions(tmp_path / "b", TOKEN)
        assert not other.find([good]) and not other.open(is_https=True).startswith(name)

    @pytest.mark.parametrize("other", ['a={"x":"1"}', "a[b]@=1", "gr\xf6\xdfe=\xfc", "{name}=of-a-neighbour"])
    def test_cookies_of_other_programs_at_this_host_hide_no_session(self, tmp_path: Path, other: str):
        sessions = Sessions(tmp_path, TOKEN)
        good = sessions.open(is_https=False).partition(";")[0]
        other = other.format(name=good.partition("=")[0]) if "{name}" in other else other
        for held in ([f"{other}; {good}"], [f"{good}; {other}"], [other, good], [good, other]):
            assert sessions.find(held), held

    def test_a_log_out_counts_where_it_can_not_be_written_down(self, visitor: Visitor, tmp_path: Path):
        with logged_in(visitor) as client:
            (tmp_path / "access" / "logged-out").mkdir()
            stolen = {"cookie": "; ".join(f"{name}={value}" for name, value in client.cookies.items())}
            answer = client.get("/logout")
            assert answer.status_code == 200 and "Max-Age=0" in answer.headers["set-cookie"]
            assert visitor().get("/live", headers=stolen).status_code == 401

    def test_the_secret_is_for_its_owner_alone(self, tmp_path: Path):
        Sessions(tmp_path, TOKEN)
        assert (tmp_path / "access" / "secret").stat().st_mode & 0o077 == 0

    def test_a_secret_that_was_cut_short_protects_nothing(self, tmp_path: Path):
        (tmp_path / "access").mkdir()
        (tmp_path / "access" / "secret").write_bytes(b"")
        assert not Sessions(tmp_path, TOKEN).find([Sessions(tmp_path, TOKEN).open(is_https=False).partition(";")[0]])

    def test_a_log_out_ends_the_session_its_sockets_and_its_cookie_for_good(self, visitor: Visitor, tmp_path: Path):
        with logged_in(visitor) as client, logged_in(visitor) as other:
            stolen = {"cookie": "; ".join(f"{name}={value}" for name, value in client.cookies.items())}
            with client.websocket_connect("ws://localhost/socket") as socket:
                answer = client.get("/logout")
                assert answer.status_code == 200 and "Max-Age=0" in answer.headers["set-cookie"]
                socket.send_text("still there?")
                with pytest.raises(WebSocketDisconnect):
                    socket.receive_text()
            assert client.get("/live").status_code == 401
            assert visitor().get("/live", headers=stolen).status_code == 401
            # also after a restart of the server, and nobody else's
            assert Visitor(tmp_path)().get("/live", headers=stolen).status_code == 401
            assert other.get("/live").status_code == 200


class TestGuesses:
    def test_pauses_grow_and_then_the_client_is_locked_out(self):
        now = 0.0
        guesses = Guesses(now=lambda: now)
        pauses = []
        for _ in range(LOCKED_AFTER):
            assert guesses.wait_s("192.0.2.1") == 0
            guesses.note_wrong("192.0.2.1")
            pauses.append(guesses.wait_s("192.0.2.1"))
            now += pauses[-1]
        assert pauses == [FIRST_PAUSE_S * 2**index for index in range(LOCKED_AFTER - 1)] + [LOCKED_S]
        assert guesses.wait_s("192.0.2.2") == 0

    def test_the_token_ends_the_counting(self):
        guesses = Guesses(now=lambda: 0.0)
        guesses.note_wrong("192.0.2.1")
        guesses.note_right("192.0.2.1")
        assert guesses.wait_s("192.0.2.1") == 0

    def test_clients_without_number_take_no_memory_without_end(self):
        guesses = Guesses(now=lambda: 0.0)
        for index in range(MAX_CLIENTS + 100):
            guesses.note_wrong(f"client-{index}")
        assert len(guesses._records) == MAX_CLIENTS

    @pytest.mark.parametrize(
        ("client", "network"),
        [
            ("192.0.2.1", "192.0.2.1"),
            ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
            ("[2001:db8:1:2::1]", "2001:db8:1:2::/64"),
            ("::ffff:192.0.2.1", "192.0.2.1"),
            ("fe80::1%eth0", "fe80::/64"),
            ("testclient", "testclient"),
        ],
    )
    def test_a_network_of_ipv6_is_one_client(self, client: str, network: str):
        assert network_of(client) == network

    def test_during_a_pause_no_token_is_tried_not_even_the_right_one(self, visitor: Visitor):
        client = visitor()
        client.get("/?token=wrong")
        answer = client.get(f"/?token={TOKEN}")
        assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
        assert client.post("/login", data={"token": TOKEN}).status_code == 429
        # whoever has a session already isn't concerned, nor is another client
        assert visitor(client="192.0.2.7").get(f"/?token={TOKEN}").status_code == 303

    def test_a_thousand_guesses_are_ten_tries(self, visitor: Visitor):
        client, statuses = visitor(client="192.0.2.9"), []
        now = 0.0
        visitor.gate._guesses = Guesses(now=lambda: now)
        for index in range(1000):
            statuses.append(client.get(f"/?token=guess-{index}").status_code)
            now += 0.5
        # 500 seconds went by: pauses of 0.5, 1, 2 ... 128 s lie between the tries
        assert statuses.count(401) <= LOCKED_AFTER and set(statuses) == {401, 429}
        assert client.get(f"/?token={TOKEN}").status_code == 429

    def test_behind_a_tunnel_each_visitor_has_pauses_of_its_own(self, visitor: Visitor):
        def tried(forwarded: str, token: str) -> int:
            return visitor().get(f"/?token={token}", headers={"x-forwarded-for": forwarded}).status_code

        assert tried("198.51.100.1", "wrong") == 401
        # what a visitor writes itself comes before what the tunnel adds
        assert tried("203.0.113.5, 198.51.100.1", TOKEN) == 429
        assert tried("198.51.100.2", TOKEN) == 303

    @pytest.mark.parametrize("kind", ["image", "iframe", "empty", "script"])
    def test_another_sites_page_can_not_have_its_visitor_locked_out(self, visitor: Visitor, kind: str):
        for _ in range(LOCKED_AFTER):
            headers = {"sec-fetch-site": "cross-site", "sec-fetch-dest": kind}
            assert visitor().get("/?token=wrong", headers=headers).status_code == 401
            assert visitor().post("/login", data={"token": "wrong"}, headers=headers).status_code == 403
        # a link in a mail or a chat opens a page
        opened = {"sec-fetch-site": "cross-site", "sec-fetch-dest": "document"}
        assert visitor().get(f"/?token={TOKEN}", headers=opened).status_code == 303

    def test_a_client_from_elsewhere_can_not_name_itself(self, visitor: Visitor):
        client = visitor(client="192.0.2.1")
        assert client.get("/?token=wrong", headers={"x-forwarded-for": "1.1.1.1"}).status_code == 401
        assert client.get("/?token=wrong", headers={"x-forwarded-for": "2.2.2.2"}).status_code == 429


class TestOtherSites:
    @pytest.mark.parametrize("headers", [{"origin": "https://evil.example"}, {"origin": "null"}])
    def test_their_websockets_and_requests_are_refused_with_a_session_and_on_loopback(
        self, visitor: Visitor, headers: dict[str, str], tmp_path: Path
    ):
        with logged_in(visitor) as client:
            for one in (client, Visitor(tmp_path, token="")()):
                assert one.get("/live").status_code == 200
                for method in ("POST", "PUT", "DELETE"):
                    assert one.request(method, "/api/x", headers=headers).status_code == 403
                with pytest.raises(WebSocketDisconnect):
                    one.websocket_connect("ws://localhost/socket", headers=headers).__enter__()

    def test_another_program_on_this_machine_is_another_site(self, tmp_path: Path):
        client = Visitor(tmp_path, token="")(base_url="http://localhost:8501")
        assert client.post("/api/x", headers={"origin": "http://localhost:8501"}).status_code == 200
        assert client.post("/api/x", headers={"origin": "http://localhost:9999"}).status_code == 403

    def test_a_browser_that_says_cross_site_is_believed(self, visitor: Visitor):
        with logged_in(visitor) as client:
            assert client.post("/api/x", headers={"sec-fetch-site": "cross-site"}).status_code == 403
            assert client.get("/logout", headers={"sec-fetch-site": "cross-site"}).status_code == 403
            # a picture in the page of another port of this host
            assert client.get("/logout", headers={"sec-fetch-site": "same-site"}).status_code == 403
            assert client.get("/live", headers={"sec-fetch-site": "cross-site"}).status_code == 200

    def test_a_proxy_that_writes_another_host_is_allowed_by_streamlits_option(
        self, visitor: Visitor, monkeypatch: pytest.MonkeyPatch
    ):
        from streamlit import config

        with logged_in(visitor) as client:
            theirs = {"origin": "https://train.example"}
            assert client.post("/api/x", headers=theirs).status_code == 403
            before = config.get_option("server.corsAllowedOrigins")
            config.set_option("server.corsAllowedOrigins", ["https://train.example"])
            try:
                assert client.post("/api/x", headers=theirs).status_code == 200
            finally:
                config.set_option("server.corsAllowedOrigins", before)


class TestOnThisMachine:
    def test_no_token_is_needed(self, tmp_path: Path):
        assert Visitor(tmp_path, token="")().get("/").status_code == 200

    @pytest.mark.parametrize(
        ("address", "base_url", "headers"),
        [
            ("0.0.0.0", "http://localhost", {}),
            ("127.0.0.1", "http://rebound.example", {}),
            # a proxy or a tunnel that writes the host anew
            ("127.0.0.1", "http://localhost", {"x-forwarded-for": "192.0.2.1"}),
            ("127.0.0.1", "http://localhost", {"forwarded": "for=192.0.2.1"}),
            ("127.0.0.1", "http://localhost", {"cf-connecting-ip": "192.0.2.1"}),
            ("127.0.0.1", "http://localhost", {"x-forwarded-proto": "https"}),
            ("127.0.0.1", "http://localhost", {"cf-ray": "8f"}),
        ],
    )
    def test_from_elsewhere_one_is_made_and_printed_once(
        self, tmp_path: Path, address: str, base_url: str, headers: dict[str, str], capsys: Any
    ):
        client = Visitor(tmp_path, token="", address=address)(base_url=base_url)
        assert [client.get(path, headers=headers).status_code for path in ("/", "/live")] == [401, 401]
        tokens = re.findall(r"\?token=(\S+)", capsys.readouterr().out)
        assert len(tokens) == 1 and len(tokens[0]) >= 32
        assert client.get(f"/?token={tokens[0]}", headers=headers).status_code == 303

    def test_another_sites_request_does_not_shut_out_who_sits_here(self, tmp_path: Path):
        visitor = Visitor(tmp_path, token="")
        assert visitor(base_url="http://rebound.example").get("/").status_code == 401
        assert visitor().get("/").status_code == 200
        with visitor().websocket_connect("ws://localhost/socket") as socket:
            socket.send_text("hello")
            assert socket.receive_text() == "hello"
        assert visitor(base_url="http://rebound.example").get("/").status_code == 401

    def test_a_token_that_was_given_is_needed_here_too(self, visitor: Visitor):
        assert visitor().get("/").status_code == 401


class TestBelowABasePath:
    """Where Streamlit's option server.baseUrlPath is set."""

    @pytest.fixture(autouse=True)
    def _base(self) -> Iterator[None]:
        from streamlit import config

        config.set_option("server.baseUrlPath", "/train/")
        yield
        config.set_option("server.baseUrlPath", "")

    def test_what_is_closed_stays_closed(self, visitor: Visitor):
        with logged_in(visitor) as client:
            assert client.get("/train/live").status_code == 200
            assert client.get("/train/_stcore/metrics").status_code == 404
            assert client.put("/train/_stcore/upload_file/a/b", content=b"x").status_code == 404

    def test_the_form_and_the_printed_link_lead_there(self, visitor: Visitor, tmp_path: Path, capsys: Any):
        assert visitor().post("/login", data={"token": TOKEN}).headers["location"] == "/train/"
        Visitor(tmp_path, token="", address="0.0.0.0")().get("/")
        assert "/train/?token=" in capsys.readouterr().out


class TestBodies:
    def test_a_form_that_does_not_come_is_not_waited_for(self, visitor: Visitor, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("ui.gate.FORM_S", 0.05)
        sent: list[Any] = []

        async def receive() -> Any:
            if sent:
                await asyncio.sleep(60)
            sent.append("beginning")
            return {"type": "http.request", "body": b"token=", "more_body": True}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/login", "headers": [], "client": ("192.0.2.1", 1)}
        asyncio.run(asyncio.wait_for(visitor.gate(scope, receive, send), 5))
        assert sent[1]["status"] == 401

    def test_one_that_says_it_is_too_long_is_not_read(self, visitor: Visitor):
        with logged_in(visitor) as client:
            assert client.post("/api/x", content=b"x" * 1000).text == "1000"
            headers = {"content-length": str(2 * 2**30)}
            assert client.post("/api/x", content=b"x", headers=headers).status_code == 413
            assert client.post("/api/x", content=b"x", headers={"content-length": "-1"}).status_code == 413

    def test_one_that_says_nothing_is_cut_off(self, visitor: Visitor):
        def pieces() -> Iterator[bytes]:
            for _ in range(MAX_BODY_BYTES // 2**20 + 1):
                yield bytes(2**20)

        with logged_in(visitor) as client:
            assert client.post("/api/x", content=pieces()).status_code == 413


def test_every_answer_tells_browsers_to_be_careful(visitor: Visitor):
    with logged_in(visitor) as client:
        for answer in (visitor().get("/"), client.get("/live")):
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["content-security-policy"] == "frame-ancestors 'self'"


@pytest.mark.parametrize(
    ("told", "heard"),
    [
        ("", "private"),
        ("no-cache", "private, no-cache"),
        ("public, immutable, max-age=9", "private, immutable, max-age=9"),
        ("no-store", "no-store"),
        ("private, max-age=9", "private, max-age=9"),
    ],
)
def test_no_proxy_may_keep_what_a_session_shows(tmp_path: Path, told: str, heard: str):
    async def page(request: Request) -> PlainTextResponse:
        return PlainTextResponse("secret", headers={"cache-control": told} if told else {})

    gate = Gate(Starlette(routes=[Route("/", page)]), token=TOKEN, address="127.0.0.1", home=tmp_path)
    client = TestClient(gate, base_url="http://localhost")
    assert client.get(f"/?token={TOKEN}").headers["cache-control"] == heard


def test_the_launcher_knows_its_own_server_by_a_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert "x-finetune-instance" not in Visitor(tmp_path)().get("/").headers
    monkeypatch.setenv("FINETUNE_INSTANCE", "abc")
    assert Visitor(tmp_path)().get("/").headers["x-finetune-instance"] == "abc"
