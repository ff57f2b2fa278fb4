"""The dashboard's shell: the gate, the routes, and the entry."""

from __future__ import annotations

import ast
import asyncio
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocket, WebSocketDisconnect

from tests.browser import ROOT, Dashboard, dashboard, status_of
from ui.gate import COOKIE, Gate
from ui.words import percent, phase_in_words, seconds_in_words

TOKEN = "open-sesame"


async def _echo(socket: WebSocket) -> None:
    await socket.accept()
    await socket.send_text("hello")
    await socket.close()


def _inner() -> Starlette:
    async def page(request: Any) -> PlainTextResponse:
        return PlainTextResponse(str(request.url.query))

    return Starlette(
        routes=[WebSocketRoute("/socket", _echo), Route("/{path:path}", page, methods=["GET", "POST", "PUT"])]
    )


def _client(token: str = TOKEN, address: str = "127.0.0.1", base_url: str = "http://localhost") -> TestClient:
    return TestClient(Gate(_inner(), token=token, address=address), base_url=base_url, follow_redirects=False)


@pytest.fixture(autouse=True)
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ui.gate.WRONG_TOKEN_DELAY_S", 0.0)
    monkeypatch.setenv("MPLBACKEND", "Agg")  # Streamlit sets it when its options are read


@pytest.mark.parametrize("path", ["/", "/live", "/_stcore/health", "/media/x.png", "/api/runs/x/series", "//live"])
def test_without_the_token_every_path_is_401(path: str):
    assert _client().get(path).status_code == 401


def test_without_the_token_uploads_and_a_wrong_token_are_401():
    client = _client()
    assert client.put("/_stcore/upload_file/a/b", content=b"x").status_code == 401
    assert client.post(f"/?token={TOKEN}").status_code == 401
    assert client.get("/?token=wrong").status_code == 401
    assert client.get("/?token=").status_code == 401
    assert client.get("/?token=%C3%A9").status_code == 401


def test_without_the_token_the_websocket_is_refused():
    with pytest.raises(WebSocketDisconnect) as caught, _client().websocket_connect("/socket"):
        pass
    assert caught.value.code == 1008


def test_the_token_gives_a_cookie_and_the_clean_address():
    client = _client()
    answer = client.get(f"/live?run=a&token={TOKEN}")
    assert (answer.status_code, answer.headers["location"]) == (303, "/live?run=a")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=Lax" in cookie and "Secure" not in cookie and TOKEN not in cookie
    assert client.get("/live?run=a").text == "run=a"
    held = {"cookie": cookie.partition(";")[0]}
    with client.websocket_connect("/socket", headers=held) as socket:
        assert socket.receive_text() == "hello"


def test_the_cookie_is_secure_behind_https():
    answer = _client().get(f"/?token={TOKEN}", headers={"x-forwarded-proto": "https"})
    assert answer.headers["set-cookie"].endswith("; Secure")


def test_the_clean_address_never_names_another_host():
    answer = _client().get(f"http://localhost//evil.example/?token={TOKEN}")
    assert answer.status_code == 303 and not answer.headers["location"].startswith("//")


def test_a_forged_or_expired_cookie_is_401():
    later, before = int(time.time()) + 1000, int(time.time()) - 1
    gate = Gate(_inner(), token=TOKEN)
    for value in (
        f"{later}.{'0' * 64}",
        f"{before}.{gate._sign(str(before))}",
        "x",
        f"{later}",
        f"x.{gate._sign('x')}",
    ):
        assert _client().get("/", headers={"cookie": f"{COOKIE}={value}"}).status_code == 401
    good = {"cookie": f"{COOKIE}={later}.{gate._sign(str(later))}"}
    assert _client().get("/", headers=good).status_code == 200
    assert _client(token="another").get("/", headers=good).status_code == 401


def test_on_loopback_no_token_is_needed():
    assert _client(token="").get("/").status_code == 200


@pytest.mark.parametrize("case", [("0.0.0.0", "http://localhost"), ("127.0.0.1", "http://rebound.example")])
def test_elsewhere_without_a_token_one_is_made_and_printed_once(case: tuple[str, str], capsys: Any):
    client = _client(token="", address=case[0], base_url=case[1])
    assert [client.get("/").status_code, client.get("/live").status_code] == [401, 401]
    tokens = re.findall(r"\?token=(\S+)", capsys.readouterr().out)
    assert len(tokens) == 1 and len(tokens[0]) >= 32
    assert client.get(f"/?token={tokens[0]}").status_code == 303


def test_an_unknown_kind_of_connection_does_not_pass():
    seen: list[str] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        seen.append("passed")

    async def send(message: Any) -> None:
        seen.append(str(message.get("status", "")))

    async def receive() -> Any:
        return {"type": "other"}

    asyncio.run(Gate(inner, token=TOKEN)({"type": "other", "headers": [], "path": "/"}, receive, send))
    assert seen[0] == "401"


def test_the_entry_is_the_form_that_streamlit_finds():
    tree = ast.parse((ROOT / "app.py").read_text())
    calls = {ast.unparse(node.targets[0]): ast.unparse(node.value.func) for node in tree.body
             if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)}  # fmt: skip
    assert calls.get("app") == "st.App"
    assert not (ROOT / "ui" / "pages").exists()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    with dashboard(tmp_path_factory.mktemp("home"), token=TOKEN) as running:
        yield running


@pytest.mark.parametrize("path", ["/", "/live", "/train", "/_stcore/health", "/_stcore/stream", "/api/plotly.min.js"])
def test_the_real_server_answers_401_without_the_token(guarded: Dashboard, path: str):
    assert status_of(guarded.url + path)[0] == 401


def test_the_real_server_lets_the_cookie_in(guarded: Dashboard):
    status, headers = status_of(f"{guarded.url}/live?token={TOKEN}")
    assert (status, headers["location"]) == (303, "/live")
    cookie = {"cookie": headers["set-cookie"].partition(";")[0]}
    assert status_of(f"{guarded.url}/_stcore/health", cookie)[0] == 200
    assert status_of(f"{guarded.url}/api/plotly.min.js", cookie)[0] == 200
    assert status_of(f"{guarded.url}/api/runs/none/series", cookie)[0] == 404


def test_the_real_server_on_all_addresses_fails_closed(tmp_path: Path):
    with dashboard(tmp_path, "--server.address=0.0.0.0") as running:
        assert status_of(f"{running.url}/_stcore/health")[0] == 401
        [token] = re.findall(r"\?token=(\S+)", running.log.read_text())
        assert status_of(f"{running.url}/?token={token}")[0] == 303


@pytest.mark.parametrize(
    ("seconds", "words"), [(None, "–"), (0.42, "0.4 s"), (9.97, "10 s"), (125, "2:05 min"), (3725, "1:02:05 h")]
)
def test_seconds_in_words(seconds: float | None, words: str):
    assert seconds_in_words(seconds) == words


def test_a_phase_in_words():
    phase = {"phase": "training", "epoch": 2, "epochs": 5, "step": 120, "steps": 313}
    assert phase_in_words(phase) == "Training: epoch 2 of 5, step 120 of 313"
    assert phase_in_words({}) == "Waiting for the worker"
    assert percent(91.25) == "91.2 %"
