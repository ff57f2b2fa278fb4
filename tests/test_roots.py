"""What paths of a browser may lead to: the folders that are open, and no way around them."""

from __future__ import annotations

import os
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from core.browser.roots import ROOTS_VARIABLE, Roots, roots_of
from core.config import make_config
from core.data import public
from core.data.download import fetch
from core.errors import DataError, PathError
from core.groups import plan_group
from core.running.resume import plan_resume, resume
from core.store import Store
from tests.test_data_page import key_of
from tests.test_groups import tiny
from tests.test_pages import MAIN, button, open_page, pages_store
from ui import group_form, registry

WAIT_S = 60


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder `open` that is a root, beside a folder `shut` that is none, and a user's home `user` in it."""
    for name in ("open", "shut", "user", "home", "work"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.setenv(ROOTS_VARIABLE, str(tmp_path / "open"))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


@pytest.fixture
def roots(place):
    return roots_of(place / "home")


@pytest.fixture
def store(place, monkeypatch):
    opened = pages_store(place / "home", monkeypatch)
    yield opened
    opened.close()


def is_refused(roots: Roots, path: object) -> bool:
    try:
        roots.check_path(str(path))
    except PathError:
        return True
    return False


def fill(folder: Path) -> Path:
    """Class folders of a few pictures."""
    from PIL import Image

    for label, name in enumerate(("cat", "dog")):
        (folder / name).mkdir(parents=True)
        for number in range(6):
            Image.new("RGB", (40, 40), (200 * label, 9 * number, 0)).save(folder / name / f"{number}.png")
    return folder


# what is open


def test_the_roots_are_the_store_the_working_folder_the_users_home_and_those_that_are_named(roots, place):
    assert set(roots.folders) >= {place / name for name in ("home", "work", "user", "open")}
    assert place / "shut" not in roots.folders


def test_what_lies_in_a_root_is_open_by_each_of_its_names(roots, place):
    (place / "open" / "link").symlink_to(place / "user")
    for path in (place / "open", place / "open" / "a" / "b.zip", "~", "~/a", "a", "./a", "a/../b", "../open/a"):
        assert not is_refused(roots, path), path
    assert not is_refused(roots, place / "open" / "link" / "a")


def test_what_is_hidden_in_a_root_is_shut_and_a_root_may_itself_be_hidden(place, monkeypatch):
    monkeypatch.setenv(ROOTS_VARIABLE, str(place / "shut" / ".deep"))
    roots = roots_of(place / "home")
    for path in ("~/.ssh", "~/.ssh/id", "~/a/.aws/b", ".git", place / "shut" / ".deep" / ".deeper"):
        assert is_refused(roots, path), path
    assert not is_refused(roots, place / "shut" / ".deep" / "a")


def test_the_whole_disk_is_a_root_only_where_it_is_named(place, monkeypatch):
    monkeypatch.setenv("HOME", "/")
    monkeypatch.chdir("/")
    assert is_refused(roots_of(place / "home"), "/etc")
    monkeypatch.setenv(ROOTS_VARIABLE, "/")
    assert not is_refused(roots_of(place / "home"), "/etc")


def test_several_roots_are_named_at_once(place, monkeypatch):
    monkeypatch.setenv(ROOTS_VARIABLE, os.pathsep.join([str(place / "open"), "", str(place / "shut")]))
    assert not is_refused(roots_of(place / "home"), place / "shut" / "a")


# ways around


WAYS_OUT = [
    "/etc",
    "/",
    "/etc/passwd",
    "../shut",
    "a/../../shut",
    "~/../shut",
    "~root",
    "~nobody-of-this-name",
    "~nobody-of-this-name/a",
    "file:///etc",
    "FILE:///etc",
    "a\0b",
    "\0",
    "",
    "a/" * 5000,
    "/proc/self/root/etc",
    "/proc/self/cwd/../shut",
    "//etc",
]


@pytest.mark.parametrize("way", WAYS_OUT, ids=lambda way: repr(way[:30]))
def test_no_spelling_of_a_path_leads_out(roots, way):
    assert is_refused(roots, way)


def test_a_link_that_leads_out_is_refused_and_so_is_one_in_a_loop(roots, place):
    inside = place / "open"
    (inside / "out").symlink_to(place / "shut")
    (inside / "far").symlink_to(place / "open" / "out")
    (inside / "round").symlink_to(inside / "round")
    (inside / "hidden").symlink_to(place / "user" / ".ssh")
    (place / "shut" / "data.zip").write_bytes(b"PK")
    (inside / "data.zip").symlink_to(place / "shut" / "data.zip")
    for name in ("out", "out/a", "far/a", "round", "round/a", "hidden", "data.zip", "out/../shut"):
        assert is_refused(roots, inside / name), name


def test_signs_of_addresses_stay_what_they_are(roots, place):
    (place / "work" / "%2e%2e").mkdir()
    assert not is_refused(roots, "%2e%2e")
    assert not is_refused(roots, "%2e%2e/%2e%2e/shut")


@pytest.mark.parametrize("kind", ["", "imagenetv2:", "hf:"])
def test_a_refusal_does_not_tell_whether_there_is_such_a_path(roots, place, kind):
    told = set()
    for name in ("here", "gone"):
        if name == "here":
            (place / "shut" / name).mkdir()
        with pytest.raises(PathError) as error:
            roots.check_spec(f"{kind}{place / 'shut' / name}")
        told.add(str(error.value).replace(name, "NAME"))
    assert len(told) == 1


def test_a_refusal_is_one_line_with_the_value_the_roots_and_the_way_to_open_another(roots, place):
    with pytest.raises(PathError) as error:
        roots.check_path(str(place / "shut"))
    words = str(error.value)
    assert "\n" not in words and f"'{place / 'shut'}'" in words and str(place / "open") in words
    assert "python -m core serve --root DIR" in words and ROOTS_VARIABLE in words


KNOWN = (
    "builtin:digits torchvision:CIFAR10 imagenetv2 imagenetv2:threshold-0.7 hf:owner/name:config hf:x "
    "https://host/a.zip"
)


@pytest.mark.parametrize("spec", KNOWN.split())
def test_data_that_are_known_by_name_need_no_root(roots, spec):
    roots.check_spec(spec)


@pytest.mark.parametrize("weights", ["default", "none", "run:20261130-120000-abcdef"])
def test_weights_that_are_known_by_name_need_no_root(roots, weights):
    roots.check_weights(weights)


@pytest.mark.parametrize("weights", ["run", "/etc/passwd", "Default", "none/../../shut", "run/../../shut/run:x"])
def test_other_weights_are_a_path(roots, place, weights):
    (place / "open" / "x").mkdir()
    refused = is_refused(roots, weights)
    try:
        roots.check_weights(weights)
    except PathError:
        assert refused
    else:
        assert not refused


# every door


def train_page(**form: str) -> AppTest:
    app = AppTest.from_file(MAIN, default_timeout=120)
    for name, value in form.items():
        app.session_state[f"form_{name}"] = value
    return app.run()


def outside(place: Path) -> dict[str, str]:
    return {"data": str(fill(place / "shut" / "pictures"))}


def test_what_a_page_queues_is_looked_at_in_the_store_itself(store, place):
    config = make_config("quick", **outside(place))
    weights = make_config("quick", weights="/etc/passwd")
    for bad in (config, weights):
        runs = plan_group({"a": make_config("quick"), "b": bad}, repeats=1, start="warm", seed=0)
        with pytest.raises(PathError):
            registry.services().store.create_run(bad)
        with pytest.raises(PathError):
            registry.services().store.create_run(bad, purpose="probe")
        with pytest.raises(PathError):
            registry.services().store.groups.create("g", runs, plan={})
    assert store.list_runs(with_probes=True) == [] and store.groups.list_all() == []


def test_a_run_that_the_command_line_began_elsewhere_is_not_resumed_from_a_browser(store, place):
    command_line = Store(store.home)
    run_id = command_line.create_run(tiny(Path(outside(place)["data"])))
    command_line.end_run(run_id, "interrupted")
    with pytest.raises(PathError, match="outside the folders"):
        resume(store, plan_resume(store, run_id))
    assert store.get_run(run_id).state == "interrupted"
    resume(command_line, plan_resume(command_line, run_id))
    assert store.get_run(run_id).state == "queued"
    command_line.close()


@pytest.mark.parametrize("is_there", [True, False])
def test_a_scan_of_what_is_shut_reads_nothing(store, place, is_there, monkeypatch):
    from core.data import sources

    monkeypatch.setattr(sources, "open_source", lambda *_: pytest.fail("it was opened"))
    spec = outside(place)["data"] if is_there else str(place / "shut" / "nothing")
    job = registry.services().scans.scan(key_of(spec))
    assert job.wait(WAIT_S) and job.state == "failed"
    assert job.problem == f"'{spec}' is outside the folders that this dashboard may read."


def test_the_form_says_so_and_nothing_can_be_started(store, place):
    app = train_page(data=outside(place)["data"])
    assert button(app, "Start").disabled and button(app, "Find a learning rate").disabled
    assert button(app, "Start the comparison").disabled
    said = "\n".join(item.value for item in app.markdown)
    assert "is outside the folders" in said.replace("\\", "")
    app = train_page(data="builtin:digits", weights=str(place / "shut" / "weights.pt"))
    assert button(app, "Start").disabled
    assert not button(train_page(data="builtin:digits"), "Start").disabled


def test_a_run_is_filled_in_again_and_the_form_says_that_its_data_are_shut(store, place):
    command_line = Store(store.home)
    run_id = command_line.create_run(tiny(Path(outside(place)["data"])))
    command_line.end_run(run_id, "interrupted")
    command_line.close()
    app = open_page("runs", run=run_id)
    button(app, "Run again with changes").click().run()
    app.switch_page("../pages/train.py")
    app.run()
    assert not app.exception and button(app, "Start").disabled
    assert any("is outside the folders" in item.value for item in app.markdown)


@pytest.mark.parametrize("option", ["data", "weights"])
def test_values_that_are_compared_are_looked_at_too(store, place, option):
    value = outside(place)["data"] if option == "data" else str(place / "shut" / "weights.pt")
    base = make_config("quick")
    choices = {option: [getattr(base, option), value]}
    comparison = group_form.comparison_of(base, choices, repeats=1, start="warm", seed=0)
    assert "is outside the folders" in comparison.problem


def test_the_command_line_goes_where_it_likes(place):
    from core.__main__ import main

    assert main(["--home", str(place / "cli"), "scan", outside(place)["data"], "--json"]) == 0


# addresses


@pytest.fixture
def neighbour(monkeypatch):
    """A server of this machine that must not be asked; `asked` lists what came."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    monkeypatch.setenv("no_proxy", "*")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running.server_port, asked
        running.shutdown()
        thread.join()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0x7f.1", "2130706433", "[::ffff:127.0.0.1]"])
def test_where_only_public_addresses_are_asked_this_machine_is_not(neighbour, tmp_path, monkeypatch, host):
    monkeypatch.setenv(public.ADDRESSES_VARIABLE, "public")
    port, asked = neighbour
    with pytest.raises(DataError, match="not in the public network"):
        fetch(f"http://{host}:{port}/a.zip", tmp_path)
    assert asked == []


def test_a_name_that_leads_inside_is_told_by_where_it_leads(neighbour, tmp_path, monkeypatch):
    """There is no public network here, so the name server is played."""
    port, asked = neighbour
    monkeypatch.setenv(public.ADDRESSES_VARIABLE, "public")
    place = (2, 1, 6, "", ("127.0.0.1", port))
    monkeypatch.setattr(public.socket, "getaddrinfo", lambda *_, **__: [place])
    with pytest.raises(DataError, match=r"rebound\.example"):
        fetch(f"http://rebound.example:{port}/a.zip", tmp_path)
    assert asked == []


def test_a_redirect_inside_is_not_followed(neighbour, tmp_path, monkeypatch):
    """There is no public network here, so one loopback address plays a public one."""
    port, asked = neighbour
    monkeypatch.setenv(public.ADDRESSES_VARIABLE, "public")
    before = public.is_public
    monkeypatch.setattr(public, "is_public", lambda address: address == "127.0.0.2" or before(address))

    class Redirecting(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(302)
            self.send_header("Location", f"http://127.0.0.1:{port}/inside.zip")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.2", 0), Redirecting) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        try:
            with pytest.raises(DataError, match=r"127\.0\.0\.1.*not in the public network"):
                fetch(f"http://127.0.0.2:{running.server_port}/a.zip", tmp_path)
        finally:
            running.shutdown()
            thread.join()
    assert asked == []


def test_the_dashboard_asks_public_addresses_alone_unless_it_is_told_otherwise():
    text = (Path(__file__).parents[1] / "app.py").read_text()
    assert f'setdefault("{public.ADDRESSES_VARIABLE}", "public")' in text


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8"])
def test_addresses_of_the_public_network_are_public(address):
    assert public.is_public(address)


INSIDE = (
    "169.254.169.254 10.1.2.3 172.16.0.1 192.168.0.1 127.0.0.1 100.64.0.1 0.0.0.0 224.0.0.1 ::1 fd00:ec2::254"
    " fe80::1%eth0 ::ffff:10.0.0.1 64:ff9b::7f00:1 2002:7f00:1::"
)


@pytest.mark.parametrize("address", INSIDE.split())
def test_addresses_of_a_machine_its_network_or_of_many_are_not(address):
    assert not public.is_public(address)


def test_an_open_address_is_asked_as_ever(neighbour, monkeypatch):
    port, asked = neighbour
    monkeypatch.delenv(public.ADDRESSES_VARIABLE, raising=False)
    public.open_url(urllib.request.Request(f"http://127.0.0.1:{port}/x"), 5).close()
    assert asked == ["/x"]
