"""The launcher: start, restart, end, and what it says where something is missing; the tunnel is a stand-in."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from core.serve import launcher
from core.serve.command import serve_command
from core.serve.knock import is_ours, shows_page
from core.serve.launcher import Launcher
from core.serve.server import Place
from core.serve.status import read_status
from core.serve.tunnels import KINDS, Tunnel
from tests.browser import ROOT, chromium_page, status_of
from tests.serving import Serving, serving
from tests.test_browser import WAIT_MS
from tests.test_browser import pytestmark as in_browser

pytestmark = pytest.mark.long

TUNNEL = ("--tunnel", "cloudflared")


def token_in(link: str) -> str:
    return link.partition("?token=")[2]


def serve(*options: str, path: str = os.environ["PATH"], home: Path) -> subprocess.CompletedProcess[str]:
    """Run it to its end, which it is expected to find by itself."""
    command = [sys.executable, "-m", "core", "serve", "--home", str(home), *options]
    environment = {**os.environ, "PATH": path}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_it_prints_the_link_when_the_public_address_shows_the_page_and_ends_both_at_ctrl_c(tmp_path: Path):
    with serving(tmp_path, *TUNNEL, mode="slow", seconds=2) as one:
        # the address is known and leads nowhere yet: nothing may be printed
        one.wait_for(lambda: "trycloudflare" in _log(one, "tunnel.log"))
        assert one.printed.read_text() == ""
        status = one.ready()
        link = one.printed.read_text().strip()
        assert link == status.link and status.address in link and len(token_in(link)) == 32
        assert shows_page(status.address, token_in(link))
        assert status_of(f"{status.address}/")[0] == 401
        assert (one.home / "serving.json").stat().st_mode & 0o077 == 0
        children = one.children()
        assert one.end() == 130
        assert [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE] == []
        assert read_status(one.home).state == "ended"  # type: ignore[union-attr]
        told = one.told.read_text()
        assert "Traceback" not in told and "The tunnel and the dashboard have ended." in told
        logs = "".join(_log(one, name) for name in ("server.log", "tunnel.log")) + told
        assert token_in(link) not in logs


def test_a_dead_tunnel_and_a_dead_server_are_noticed_told_of_and_started_again(tmp_path: Path):
    with serving(tmp_path, *TUNNEL, mode="ok") as one:
        first = one.ready()
        one.order(mode="limited")
        os.kill(one.starts()[-1]["pid"], signal.SIGKILL)
        one.wait_for(one.says("its rate limit is reached"))
        assert one.status_if("trouble")() or one.status_if("ready")()
        one.order(mode="ok")
        one.wait_for(one.says("The dashboard has a new address"))
        second = one.wait_for(lambda: (now := one.status_if("ready")()) and now.link != first.link and now)
        # the link is printed a moment after the status says it
        assert one.wait_for(lambda: one.printed.read_text() == f"{first.link}\n{second.link}\n")
        # every second try takes the protocol that passes more networks
        assert "http2" in one.starts()[1]["arguments"] and "http2" not in one.starts()[2]["arguments"]
        [server] = [child for child in one.children() if "streamlit" in child.cmdline()]
        cookie = {"cookie": status_of(second.link)[1]["set-cookie"].partition(";")[0]}
        server.kill()
        one.wait_for(one.says("The dashboard ended with status -9"))
        one.wait_for(one.says("The dashboard is up again."))
        # the address stays, and whoever was in stays in
        assert read_status(one.home).link == second.link  # type: ignore[union-attr]
        assert status_of(f"{second.address}/_stcore/health", cookie)[0] == 200


def test_a_server_that_dies_while_the_tunnel_opens_is_waited_for(tmp_path: Path):
    with serving(tmp_path, *TUNNEL, mode="slow", seconds=4) as one:
        one.wait_for(one.starts)
        [server] = [child for child in one.children() if "streamlit" in child.cmdline()]
        server.kill()
        one.wait_for(one.says("The dashboard is up again."))
        assert shows_page(one.ready().address, token_in(one.ready().link))
        assert len(one.starts()) == 1


def test_a_second_ctrl_c_breaks_off_and_leaves_no_process_and_no_link(tmp_path: Path):
    with serving(tmp_path, *TUNNEL, mode="ok") as one:
        one.ready()
        children = one.children()
        one.process.send_signal(signal.SIGINT)
        one.wait_for(one.says("Ending;"))
        assert one.end() == 130
        # nothing is left to the kernel, which ends orphans on Linux alone
        assert [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE] == []
        status = read_status(one.home)
        assert status is not None and (status.state, status.link, status.local) == ("ended", "", "")
        assert "Traceback" not in one.told.read_text()


def test_what_it_started_ends_with_a_launcher_that_is_killed(tmp_path: Path):
    with serving(tmp_path, *TUNNEL, mode="ok") as one:
        one.ready()
        children = one.children()
        assert len(children) == 2
        one.end(signal.SIGKILL)
        _, alive = psutil.wait_procs(children, 30)
        assert alive == []


class TestInABrowser:
    pytestmark = in_browser

    def test_the_link_opens_the_app_through_the_tunnel_and_so_does_its_next_one(self, tmp_path: Path):
        with serving(tmp_path, *TUNNEL, mode="ok") as one, chromium_page() as page:
            first = one.ready()
            page.goto(f"{first.address}/live")
            page.get_by_text("This dashboard needs its token").wait_for(timeout=WAIT_MS)
            page.goto(first.link)
            # a page is drawn from what the websocket brings
            page.get_by_text("Start from").wait_for(timeout=WAIT_MS)
            assert page.url == f"{first.address}/"
            os.kill(one.starts()[-1]["pid"], signal.SIGKILL)
            second = one.wait_for(lambda: (now := one.status_if("ready")()) and now.link != first.link and now)
            page.goto(second.link)
            page.get_by_text("Start from").wait_for(timeout=WAIT_MS)


def test_json_is_one_object_also_when_the_address_changes(tmp_path: Path):
    with serving(tmp_path, "--tunnel", "ngrok", "--json", "--qr", program="ngrok", mode="ok") as one:
        one.ready()
        os.kill(one.starts()[-1]["pid"], signal.SIGTERM)
        one.wait_for(one.says("Now at http://127.0.0.1"))
        shown = json.loads(one.printed.read_text())
        assert shown["link"] == f"{shown['address']}/?token={token_in(shown['link'])}"
        assert shown["home"] == str(one.home) and shown["ready_s"] > 0
        assert "█" in one.told.read_text()


class TestWhatIsMissing:
    def test_no_tunnel_program(self, tmp_path: Path):
        for kind in KINDS.values():
            done = serve("--tunnel", kind.name, home=tmp_path / "home", path=str(tmp_path))
            assert done.returncode == 2 and done.stdout == ""
            assert done.stderr == f"{kind.name} is not installed. {kind.get}, or take --tunnel none.\n"

    def test_a_port_in_use(self, tmp_path: Path):
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            port = other.getsockname()[1]
            done = serve("--port", str(port), home=tmp_path / "home")
        assert done.returncode == 2
        assert done.stderr == f"Port {port} is in use. Take another with --port, or --port 0 for any free one.\n"

    def test_packages_that_do_not_fit_each_other(self, tmp_path: Path):
        """The package is a stand-in: its metadata alone, before the real one's on the path."""
        info = tmp_path / "torchvision-0.9.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.9.0\nRequires-Dist: torch (==1.8.0)\n"
        )
        command = [sys.executable, "-m", "core", "serve", "--home", str(tmp_path / "home")]
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 2 and done.stderr.startswith("torchvision 0.9.0 asks for torch==1.8.0, and ")
        assert "python -m pip install torchvision torch==" in done.stderr and done.stderr.count("\n") == 1

    @pytest.mark.parametrize(
        ("options", "problem"),
        [
            (["--port", "70000"], "There is no port 70000."),
            (["--token", "short"], "The token has 5 characters, which can be guessed."),
            (["--address", "192.0.2.1"], "Address '192.0.2.1' can't be listened on"),
            (["--address", "no.such.host.invalid"], "Address 'no.such.host.invalid' can't be listened on"),
            (["--root", "/no/such/folder"], "--root '/no/such/folder' is no folder."),
        ],
    )
    def test_options_that_can_not_be_met(self, tmp_path: Path, options: list[str], problem: str):
        done = serve(*options, home=tmp_path / "home")
        assert done.returncode == 2 and done.stderr.startswith(problem) and done.stderr.count("\n") == 1

    def test_a_home_that_can_not_be_used(self, tmp_path: Path):
        (tmp_path / "home").write_text("a file")
        done = serve("--port", "0", home=tmp_path / "home")
        assert done.returncode == 2 and done.stderr.startswith(f"The home folder '{tmp_path}/home' can't be used")

    @pytest.mark.parametrize(
        ("mode", "problem"),
        [
            ("limited", "Cloudflare gives out no more addresses for now: its rate limit is reached."),
            ("offline", "The tunnel's provider can't be reached."),
        ],
    )
    def test_a_tunnel_that_never_opens_is_given_up_after_some_tries(self, tmp_path: Path, mode: str, problem: str):
        with serving(tmp_path, *TUNNEL, mode=mode) as one:
            assert one.process.wait(120) == 2
            lines = one.told.read_text().splitlines()
        assert len(one.starts()) == launcher.FIRST_TRIES
        assert [line.startswith(problem) for line in lines] == [True] * launcher.FIRST_TRIES
        assert [line.rpartition(" in ")[2] for line in lines[:-1]] == ["1 s.", "2 s.", "4 s."]
        status = read_status(one.home)
        assert status is not None and (status.state, status.problem) == ("trouble", problem) and status.local == ""

    def test_ngrok_without_an_account_is_not_tried_again(self, tmp_path: Path):
        with serving(tmp_path, "--tunnel", "ngrok", program="ngrok", mode="no-authtoken") as one:
            assert one.process.wait(120) == 2
            assert "ngrok needs the authtoken of an account. Run ngrok config add-authtoken" in one.told.read_text()
        assert len(one.starts()) == 1

    @pytest.mark.parametrize(
        ("mode", "problem"),
        [
            ("silent", "cloudflared gave no address. It said nothing."),
            ("unreachable", "The address http://127.0.0.1:9 does not lead to the dashboard after 1 s."),
        ],
    )
    def test_a_tunnel_that_is_silent_or_leads_nowhere(
        self, tmp_path: Path, mode: str, problem: str, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(launcher, "ADDRESS_S", 2.0)
        monkeypatch.setattr(launcher, "REACH_S", 1.0)
        monkeypatch.setattr(launcher, "FIRST_TRIES", 1)
        assert str(_launched(tmp_path, mode, monkeypatch)).startswith(problem)

    def test_an_address_at_which_somebody_else_answers_is_not_shown(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        import http.server
        import threading

        monkeypatch.setattr(launcher, "REACH_S", 1.0)
        monkeypatch.setattr(launcher, "FIRST_TRIES", 1)
        asked: list[str] = []

        class Other(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(self.path)
                self.send_response(401)
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Other) as other:
            thread = threading.Thread(target=other.serve_forever)
            thread.start()
            address = f"http://127.0.0.1:{other.server_port}"
            error = _launched(tmp_path, "ok", monkeypatch, address=address)
            other.shutdown()
            thread.join()
        assert str(error).startswith(f"The address {address} does not lead to the dashboard")
        # and it was never told the token
        assert set(asked) == {"/"}


def _launched(tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch, **orders: str) -> BaseException:
    """What ends a launcher in this process whose tunnel does that."""
    from core.serve.launcher import new_home
    from core.serve.server import free_port

    with serving(tmp_path, "--help", mode=mode, **orders) as one:
        one.process.wait(60)
    monkeypatch.setenv("PATH", f"{tmp_path / 'programs'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TUNNEL_DOUBLE", str(one.orders / "orders.json"))
    place = Place(one.home, free_port("127.0.0.1"), "a-token-of-a-test", "an-instance")
    new_home(one.home)
    told: list[str] = []
    with pytest.raises(launcher.ServeError) as caught:
        Launcher(place, KINDS["cloudflared"], told.append, lambda status: told.append(status.link), lambda: False).run()
    assert told == []
    return caught.value


def _log(one: Serving, name: str) -> str:
    path = one.home / name
    return path.read_text() if path.exists() else ""


def test_a_launcher_without_a_tunnel_serves_this_machine_with_a_token(tmp_path: Path):
    with serving(tmp_path, "--token", "a-token-of-mine") as one:
        status = one.ready()
        assert one.printed.read_text().strip() == status.local and token_in(status.local) == "a-token-of-mine"
        assert (status.link, status.address) == ("", "")
        assert status_of(status.local.partition("?")[0])[0] == 401
        assert shows_page(status.local.partition("/?")[0], "a-token-of-mine")
        assert not is_ours(status.local.partition("/?")[0], "another-instance")
        began = time.monotonic()
        assert one.end(signal.SIGTERM) == 143
        assert time.monotonic() - began < 20


def test_the_tunnels_program_is_not_told_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = tmp_path / "cloudflared"
    program.write_text('#!/bin/sh\necho "$@"; env; echo over\n')
    program.chmod(0o755)
    monkeypatch.setenv("FINETUNE_TOKEN", "a-token-of-mine")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    tunnel, log = Tunnel(KINDS["cloudflared"], "http://127.0.0.1:1", 0, tmp_path / "log"), tmp_path / "log"
    while tunnel.lives:
        time.sleep(0.02)
    tunnel.stop()
    assert "over" in log.read_text() and str(tmp_path) in log.read_text()
    assert "a-token-of-mine" not in log.read_text()


def test_its_help_names_every_option(capsys: pytest.CaptureFixture[str]):
    from core.__main__ import main

    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    shown = capsys.readouterr().out
    assert all(option in shown for option in ("--tunnel", "--port", "--token", "--address", "--root", "--qr"))
    assert serve_command.__doc__


def test_the_container_starts_what_the_command_line_knows():
    """Docker can't be run here: its recipe is read, and what it runs and copies is there."""
    from core.commands.options import parser

    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if line and not line.startswith("#")]
    [entry] = [json.loads(line.removeprefix("ENTRYPOINT ")) for line in lines if line.startswith("ENTRYPOINT ")]
    assert entry[:3] == ["python", "-m", "core"]
    assert parser().parse_args([*entry[3:], "--root", "/pictures"]).address == "0.0.0.0"
    copied = [line.split()[1:-1] for line in lines if line.startswith("COPY ")]
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for name in (name for names in copied for name in names):
        assert (ROOT / name).exists() and f"!{name}" in ignored
    pins = {line for line in (ROOT / "requirements.txt").read_text().splitlines() if "==" in line}
    [torch] = [line for line in lines if line.startswith("ARG TORCH=")]
    assert set(torch.partition("=")[2].strip('"').split()) <= pins
