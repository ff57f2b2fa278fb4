"""The dashboard's shell: the gate, the routes, and the entry."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import ROOT, Dashboard, dashboard, status_of
from ui.words import percent, phase_in_words, seconds_in_words

TOKEN = "open-sesame"


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
