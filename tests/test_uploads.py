"""Uploads: in slices, onto the disk, whole or not there, and never more than was said."""

from __future__ import annotations

import http.client
import io
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
import zipfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image
from streamlit.testing.v1 import AppTest

from core.browser.shelf import SIZE_VARIABLE, Limits, UploadError, limits_here, safe_name
from core.browser.uploads import INCOMING, Incoming, Uploads
from core.config import make_config
from core.data.scan import scan
from core.data.sources import open_source
from tests.browser import ROOT, Dashboard, chromium_page, dashboard
from tests.test_pages import MAIN, pages_store
from ui import registry
from ui import uploads as page_uploads

pytestmark = pytest.mark.long

WAIT_S = 30
SMALL = Limits(free_bytes=0)


def packed(num: int = 6, extra: dict[str, bytes] | None = None) -> bytes:
    """A .zip of two class folders."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for label, name in enumerate(("cat", "dog")):
            for number in range(num):
                picture = io.BytesIO()
                Image.new("RGB", (40, 40), (200 * label, 9 * number, 0)).save(picture, "png")
                archive.writestr(f"{name}/{number}.png", picture.getvalue())
        for name, data in (extra or {}).items():
            archive.writestr(name, data)
    return out.getvalue()


def send(uploads: Uploads, name: str, data: bytes, slice_bytes: int = 1000) -> Incoming:
    """Send all of it and wait until it is unpacked or refused."""
    upload = uploads.begin(name, len(data))
    for start in range(0, len(data), slice_bytes):
        piece = data[start : start + slice_bytes]
        uploads.write(upload, uploads.take_turn(upload, start, len(piece)), piece)
    return ended(upload)


def ended(upload: Incoming) -> Incoming:
    deadline = time.monotonic() + WAIT_S
    while upload.is_under_way and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not upload.is_under_way
    return upload


def left_in(home: Path) -> list[str]:
    """What lies in the folder of uploads, but for the place of those under way where it is empty."""
    folder = home / "uploads"
    found = [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"] if folder.is_dir() else []
    return sorted({path.relative_to(folder).parts[0] for path in found})


@pytest.fixture
def uploads(tmp_path):
    made = Uploads(tmp_path, SMALL)
    yield made
    made.close()


# what becomes of an archive


def test_an_upload_is_unpacked_its_archive_deleted_and_what_was_left_out_is_still_told(uploads, tmp_path):
    data = packed(extra={"../evil.png": b"x"})
    upload = send(uploads, "my pets.zip", data)
    assert upload.state == "ready", upload.problem
    [kept] = uploads.kept()
    assert kept.name == upload.kept and kept.name.startswith("my pets-")
    assert left_in(tmp_path) == [kept.name] and kept.size_bytes == sum(
        path.stat().st_size for path in (kept.path / "images").rglob("*.png")
    )
    assert {path.name for path in kept.path.iterdir()} == {"images", "contents.json"}
    (tmp_path / "a.zip").write_bytes(data)
    home = tmp_path / "other"
    told = []
    for spec in (kept.path, tmp_path / "a.zip"):
        found = scan(open_source(str(spec), home), home=home, seed=0, val_percent=20)
        told.append((found.classes, [item.file for item in found.train], found.skipped))
    assert told[0] == told[1] and [item.file for item in told[0][2]] == ["../evil.png"]


def test_equal_uploads_lie_once(uploads, tmp_path):
    first, second = (send(uploads, "a.zip", packed()) for _ in range(2))
    assert first.kept == second.kept and len(uploads.kept()) == 1


@pytest.mark.parametrize(
    ("data", "words"),
    [(b"no archive at all", "neither a .zip nor a .tar"), (packed()[:-300], "cut off or damaged")],
)
def test_what_is_no_whole_archive_is_refused_and_gone(uploads, tmp_path, data, words):
    upload = send(uploads, "a.zip", data)
    assert upload.state == "failed" and words in upload.problem and upload.fix
    assert left_in(tmp_path) == []


NAMES = {
    "../../etc/cron.d/x.zip": "x.zip",
    "..\\..\\x.zip": "x.zip",
    "a\0b.zip": "a_b.zip",
    "<img src=x onerror=alert(1)>.zip": "_img src_x onerror_alert(1)_.zip",
    ".hidden.zip": "hidden.zip",
    "犬と猫.tar.gz": "犬と猫.tar.gz",
    "..": "upload",
    "x" * 300 + ".zip": "x" * 76 + ".zip",
    "/": "upload",
}


@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name[:20]))
def test_names_are_made_safe(name):
    assert safe_name(name) == NAMES[name]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("..", "/")], ids=lambda name: repr(name[:20]))
def test_no_name_leads_out_of_the_folder(uploads, tmp_path, name):
    data = packed() if not name.endswith("gz") else tar_of(packed())
    upload = send(uploads, name, data)
    assert upload.state == "ready", upload.problem
    assert {path.name for path in tmp_path.iterdir()} == {"uploads"} and len(left_in(tmp_path)) == 1


def tar_of(data: bytes) -> bytes:
    import tarfile

    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as archive, tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name in archive.namelist():
            entry = tarfile.TarInfo(name)
            entry.size = len(archive.read(name))
            tar.addfile(entry, io.BytesIO(archive.read(name)))
    return out.getvalue()


# limits


@pytest.mark.parametrize(
    ("name", "size", "status"),
    [("a.zip", 2 * 2**30 + 1, 413), ("a.exe", 10, 415), ("a.gz", 10, 415), ("a.zip", 0, 400), ("a.zip", -5, 400)],
)
def test_what_is_claimed_is_refused_before_the_first_byte(uploads, tmp_path, name, size, status):
    with pytest.raises(UploadError) as error:
        uploads.begin(name, size)
    assert error.value.status == status and left_in(tmp_path) == []


def test_two_come_at_a_time(uploads):
    first = uploads.begin("a.zip", 10)
    uploads.begin("b.zip", 10)
    with pytest.raises(UploadError, match="2 uploads are under way") as error:
        uploads.begin("c.zip", 10)
    assert error.value.status == 429
    uploads.cancel(first.upload_id)
    uploads.begin("c.zip", 10)


def test_the_eleventh_is_refused_until_one_is_removed(uploads):
    for number in range(10):
        send(uploads, f"{number}.zip", packed(2))
    with pytest.raises(UploadError, match="10 uploads are kept") as error:
        uploads.begin("11.zip", 10)
    assert error.value.status == 409
    uploads.remove(uploads.kept()[0].name)
    uploads.begin("11.zip", 10)


def test_space_is_counted_with_what_is_still_to_come(tmp_path):
    import shutil

    free = shutil.disk_usage(tmp_path).free
    uploads = Uploads(tmp_path, Limits(size_bytes=free, free_bytes=free // 2))
    with pytest.raises(UploadError, match="There is no space") as error:
        uploads.begin("a.zip", free * 3 // 4)
    assert error.value.status == 507
    uploads.begin("a.zip", free * 2 // 5)
    with pytest.raises(UploadError, match="There is no space"):
        uploads.begin("b.zip", free * 2 // 5)
    uploads.close()


def test_more_than_was_claimed_ends_the_upload(uploads, tmp_path):
    upload = uploads.begin("a.zip", 10)
    with pytest.raises(UploadError) as error:
        uploads.take_turn(upload, 0, 11)
    assert (error.value.status, error.value.offset) == (413, 0)
    with pytest.raises(UploadError, match="longer than it was said"):
        uploads.write(upload, uploads.take_turn(upload, 0, None), b"x" * 11)
    with pytest.raises(UploadError) as error:
        uploads.find(upload.upload_id)
    assert error.value.status == 404 and left_in(tmp_path) == []


def test_a_slice_that_does_not_come_next_is_told_where_to_go_on(uploads):
    upload = uploads.begin("a.zip", 10)
    uploads.write(upload, uploads.take_turn(upload, 0, 4), b"abcd")
    for offset in (0, 3, 5, 10, 11):
        with pytest.raises(UploadError) as error:
            uploads.take_turn(upload, offset, 1)
        assert (error.value.status, error.value.offset) == (409, 4)


def test_a_slice_that_hung_in_the_line_writes_nothing_once_another_came(uploads):
    upload = uploads.begin("a.zip", 10)
    old = uploads.take_turn(upload, 0, 4)
    new = uploads.take_turn(upload, 0, 4)
    uploads.write(upload, new, b"abcd")
    with pytest.raises(UploadError) as error:
        uploads.write(upload, old, b"ABCD")
    assert error.value.offset == 4 and upload.path.read_bytes() == b"abcd"


def test_the_same_file_goes_on_and_another_one_begins(uploads):
    upload = uploads.begin("a.zip", 10, modified=5)
    uploads.write(upload, uploads.take_turn(upload, 0, 4), b"abcd")
    assert uploads.begin("a.zip", 10, modified=5) is upload
    assert uploads.begin("a.zip", 10, modified=6) is not upload


def test_an_hour_without_a_byte_ends_it(tmp_path):
    now = [0.0]
    uploads = Uploads(tmp_path, SMALL, clock=lambda: now[0])
    upload = uploads.begin("a.zip", 10)
    now[0] = 3000
    uploads.write(upload, uploads.take_turn(upload, 0, 1), b"a")
    now[0] = 6500
    assert uploads.find(upload.upload_id) is upload
    now[0] = 6601
    with pytest.raises(UploadError):
        uploads.find(upload.upload_id)
    assert left_in(tmp_path) == []
    uploads.close()


def test_what_a_killed_process_left_goes_at_the_next_start_and_what_another_receives_stays(uploads, tmp_path):
    program = (
        "import os, sys\nfrom pathlib import Path\nfrom core.browser.uploads import Uploads, Limits\n"
        "uploads = Uploads(Path(sys.argv[1]), Limits(free_bytes=0))\n"
        "upload = uploads.begin('a.zip', 10)\nuploads.write(upload, uploads.take_turn(upload, 0, 4), b'abcd')\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, check=False, timeout=60)
    [left] = left_in(tmp_path)
    assert left.startswith(INCOMING)
    mine = uploads.begin("b.zip", 10)
    Uploads(tmp_path, SMALL)
    assert mine.path.is_file() and left not in left_in(tmp_path)


def test_a_disk_that_becomes_full_is_told_and_gets_its_space_back(tmp_path):
    """In a disk of 8 MiB that only this test's child sees."""
    program = (
        "import json, shutil, sys\nfrom pathlib import Path\n"
        "from core.browser.uploads import Uploads, Limits, UploadError\n"
        "home = Path(sys.argv[1])\nuploads = Uploads(home, Limits(free_bytes=0))\n"
        "upload = uploads.begin('a.zip', 7 * 2**20)\n"
        "(home / 'other').write_bytes(b'x' * 5 * 2**20)\nsaid = ''\n"
        "try:\n    for place in range(7):\n"
        "        uploads.write(upload, uploads.take_turn(upload, place * 2**20, 2**20), b'a' * 2**20)\n"
        "except UploadError as error:\n    said = (error.status, str(error))\n"
        "print(json.dumps([said, shutil.disk_usage(home).free > 2**21]))\n"
    )
    script = f'mount -t tmpfs -o size=8m tmpfs "{tmp_path}" && exec "{sys.executable}" -c "$PROGRAM" "{tmp_path}"'
    made = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", script],
        cwd=ROOT, env={**os.environ, "PROGRAM": program}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    if "unshare" in made.stderr or "mount" in made.stderr:
        pytest.skip(f"no disk of its own can be made here: {made.stderr.strip()}")
    [[status, words], has_space] = json.loads(made.stdout)
    assert status == 507 and "no space left for 'a.zip'" in words and has_space


def test_the_size_that_may_be_sent_is_set_by_the_environment(monkeypatch):
    monkeypatch.setenv(SIZE_VARIABLE, "0.5")
    assert limits_here().size_bytes == 2**29
    monkeypatch.setenv(SIZE_VARIABLE, "much")
    with pytest.raises(Exception, match="'much', which is no number"):
        limits_here()


# removal, and the page


@pytest.fixture
def store(tmp_path, monkeypatch):
    opened = pages_store(tmp_path / "home", monkeypatch)
    yield opened
    registry.services().uploads.close()
    opened.close()


def test_an_upload_is_not_removed_while_a_run_uses_it(store):
    uploads = registry.services().uploads
    kept = uploads.folder / send(uploads, "a.zip", packed()).kept
    run_id = store.create_run(make_config("quick", data=str(kept / "images")), name="its run")
    with pytest.raises(UploadError, match="used by the run its run"):
        page_uploads.remove_upload(kept.name)
    store.end_run(run_id, "stopped")
    page_uploads.remove_upload(kept.name)
    assert not kept.exists() and left_in(store.home) == []


def test_a_name_from_elsewhere_removes_nothing(store, tmp_path):
    (tmp_path / "mine").mkdir()
    for name in ("../../mine", str(tmp_path / "mine"), "", ".", ".."):
        page_uploads.remove_upload(name)
    assert (tmp_path / "mine").is_dir() and store.home.is_dir()


def test_the_page_lists_uploads_and_removes_them(store):
    uploads = registry.services().uploads
    name = send(uploads, "a.zip", packed()).kept
    app = AppTest.from_file(MAIN, default_timeout=120).run()
    app.switch_page("../pages/data.py")
    app.run()
    app.button(key=f"use_{name}").click().run()
    assert app.session_state["form_data"] == str(uploads.folder / name)
    job = registry.services().scans.find(app_key(app))
    assert job is not None and job.wait(WAIT_S) and job.state == "done"
    app.button(key=f"remove_{name}").click().run()
    assert not app.exception and uploads.kept() == []


def app_key(app: AppTest) -> Any:
    from tests.test_data_page import key_of

    return key_of(app.session_state["form_data"])


# the route


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with dashboard(tmp_path_factory.mktemp("home")) as started:
        yield started


def ask(
    where: Dashboard, method: str, path: str = "", body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, Any]]:
    """A request of the page's kind, and its answer."""
    host = where.url.removeprefix("http://")
    usual = {"x-finetune": "upload", "origin": where.url}
    usual |= {"content-type": "application/json" if method == "POST" else "application/octet-stream"}
    connection = http.client.HTTPConnection(host, timeout=WAIT_S)
    try:
        sent = json.dumps(body) if method == "POST" and not isinstance(body, bytes) else body
        connection.request(method, f"/api/uploads{path}", sent, {**usual, **(headers or {})})
        answer = connection.getresponse()
        text = answer.read()
        return answer.status, json.loads(text) if text.startswith(b"{") else {}
    finally:
        connection.close()


@contextmanager
def begun(where: Dashboard, name: str, size: int) -> Any:
    """An upload that is cancelled in the end."""
    status, told = ask(where, "POST", body={"name": name, "size": size, "modified": random.random()})
    assert status == 201, told
    try:
        yield f"/{told['id']}"
    finally:
        ask(where, "DELETE", f"/{told['id']}")


@pytest.mark.browser
def test_an_archive_arrives_slice_by_slice(running):
    data = packed()
    with begun(running, "pets.zip", len(data)) as path:
        for start in range(0, len(data), 700):
            status, told = ask(running, "PUT", f"{path}?offset={start}", data[start : start + 700])
            assert status == 200 and told["offset"] == min(start + 700, len(data))
        deadline = time.monotonic() + WAIT_S
        while told["state"] == "unpacking" and time.monotonic() < deadline:
            status, told = ask(running, "GET", path)
        assert told["state"] == "ready" and told["kept"].startswith("pets-")
        assert str(running.log.parent) not in json.dumps(told)


@pytest.mark.browser
def test_a_claim_of_three_gib_is_refused_at_once(running):
    before = time.monotonic()
    status, told = ask(running, "POST", body={"name": "a.zip", "size": 3 * 2**30})
    assert status == 413 and "3.0 GiB" in told["problem"] and told["fix"]
    assert time.monotonic() - before < 5


BAD_REQUESTS = {
    "no json": (b"{", {}),
    "a list": (b"[1]", {}),
    "deep": (b"[" * 10_000, {}),
    "size as text": (json.dumps({"name": "a.zip", "size": "9"}).encode(), {}),
    "size as truth": (json.dumps({"name": "a.zip", "size": True}).encode(), {}),
    "name as number": (json.dumps({"name": 5, "size": 9}).encode(), {}),
    "too long": (json.dumps({"name": "a" * 100_000, "size": 9}).encode(), {}),
    "without the header": (json.dumps({"name": "a.zip", "size": 9}).encode(), {"x-finetune": ""}),
    "as a form": (b"name=a.zip", {"content-type": "application/x-www-form-urlencoded"}),
    "as text": (json.dumps({"name": "a.zip", "size": 9}).encode(), {"content-type": "text/plain"}),
}


@pytest.mark.browser
@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_what_the_page_would_not_send_is_refused(running, case):
    body, headers = BAD_REQUESTS[case]
    status, _ = ask(running, "POST", body=body, headers=headers)
    assert status in (400, 403, 415)
    assert "Traceback" not in running.log.read_text()


@pytest.mark.browser
@pytest.mark.parametrize("offset", ["", "-1", "1e3", "٣", "9" * 40, "0x1", "1"])
def test_a_slice_must_say_where_it_begins(running, offset):
    with begun(running, "a.zip", 10) as path:
        assert ask(running, "PUT", f"{path}?offset={quote(offset)}", b"x")[0] in (400, 409)
        assert ask(running, "PUT", f"{path}?offset=0", b"x", {"x-finetune": "no"})[0] == 403
        assert ask(running, "PUT", f"{path}?offset=0", b"x", {"content-type": "text/plain"})[0] == 415
        assert ask(running, "GET", path)[1]["offset"] == 0


def quote(text: str) -> str:
    from urllib.parse import quote as quoted

    return quoted(text)


@pytest.mark.browser
def test_ids_are_not_paths(running):
    for path in ("/..%2f..%2fetc", "/%2e%2e", "/a%00b", "/" + "a" * 5000):
        assert ask(running, "GET", path)[0] in (400, 404)
        assert ask(running, "DELETE", path)[0] in (200, 400, 404, 405)
    assert "Traceback" not in running.log.read_text()


@pytest.mark.browser
def test_a_slice_that_is_longer_than_it_may_be_is_cut(running):
    def endless() -> Any:
        for _ in range(40):
            yield b"x" * 2**18

    with begun(running, "a.zip", 2**30) as path:
        # without a length beforehand, in pieces
        status = over_the_wire(running, f"{path}?offset=0", endless())
        assert status in (413, 0)
        assert ask(running, "GET", path)[1]["offset"] <= 8 * 2**20
    with begun(running, "b.zip", 1000) as path:
        assert over_the_wire(running, f"{path}?offset=0", iter([b"x" * 2000])) in (413, 0)
        assert ask(running, "GET", path)[0] == 404


def over_the_wire(where: Dashboard, path: str, pieces: Any) -> int:
    """PUT in chunks; 0 where the server hangs up before it answers."""
    connection = http.client.HTTPConnection(where.url.removeprefix("http://"), timeout=WAIT_S)
    headers = {"x-finetune": "upload", "content-type": "application/octet-stream", "origin": where.url}
    try:
        connection.request("PUT", f"/api/uploads{path}", pieces, headers, encode_chunked=True)
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


@pytest.mark.browser
def test_an_upload_that_is_cut_goes_on_where_the_server_says(running):
    data = packed(extra={"noise.bin": os.urandom(4 * 2**20)})
    deadline, offset = time.monotonic() + WAIT_S, 0
    with begun(running, "cut.zip", len(data)) as path:
        host, port = running.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as line:
            head = (
                f"PUT /api/uploads{path}?offset=0 HTTP/1.1\r\nHost: {host}:{port}\r\nx-finetune: upload\r\n"
                f"Origin: {running.url}\r\n"
                f"Content-Type: application/octet-stream\r\nContent-Length: {len(data)}\r\n\r\n"
            )
            line.sendall(head.encode() + data[: 5 * 2**19])
            while offset < 2**20 and time.monotonic() < deadline:
                offset = ask(running, "GET", path)[1]["offset"]
        assert 2**20 <= offset <= 5 * 2**19
        status, told = ask(running, "PUT", f"{path}?offset=0", data)
        assert status == 409 and told["offset"] >= offset
        offset = told["offset"]
        status, told = ask(running, "PUT", f"{path}?offset={offset}", data[offset:])
        assert status == 200
        while told["state"] == "unpacking" and time.monotonic() < deadline:
            status, told = ask(running, "GET", path)
        assert told["state"] == "ready", told


def settled_memory(process: psutil.Process) -> int:
    """Bytes, once the libraries are loaded, which goes on beside the first requests."""
    deadline, before = time.monotonic() + 2 * WAIT_S, 0
    while abs(process.memory_info().rss - before) > 2**20 and time.monotonic() < deadline:
        before = process.memory_info().rss
        time.sleep(2)
    return process.memory_info().rss


@pytest.mark.browser
def test_the_servers_memory_does_not_grow_by_the_files_size(running):
    total, piece = 256 * 2**20, os.urandom(8 * 2**20)
    with begun(running, "large.zip", total) as path:
        process = psutil.Process(running.process.pid)
        ask(running, "PUT", f"{path}?offset=0", piece)
        before, most = settled_memory(process), 0
        for start in range(len(piece), total, len(piece)):
            status, told = ask(running, "PUT", f"{path}?offset={start}", piece)
            assert status == 200
            most = max(most, process.memory_info().rss)
        assert most - before < 64 * 2**20
        deadline = time.monotonic() + WAIT_S
        while told["state"] == "unpacking" and time.monotonic() < deadline:
            status, told = ask(running, "GET", path)
        assert told["state"] == "failed" and "neither a .zip nor a .tar" in told["problem"]


# the field


def chooser_by_key(page: Any) -> Any:
    """The dialog that Enter opens; a page that is still being drawn may take the focus away."""
    from playwright.sync_api import TimeoutError

    for _ in range(5):
        try:
            with page.expect_file_chooser(timeout=6_000) as chooser:
                page.locator(".upload-choose").press("Enter")
        except TimeoutError:
            continue
        return chooser.value
    raise AssertionError("no dialog opens")


@pytest.mark.browser
def test_a_file_is_chosen_sent_and_looked_at_and_a_cut_is_got_over(tmp_path):
    archive = tmp_path / "my <b>pets</b>.zip".replace("/", "_")
    archive.write_bytes(packed(40))
    with dashboard(tmp_path / "home") as started, chromium_page() as page:
        page.goto(f"{started.url}/data")
        page.get_by_text("Upload an archive").click()
        chooser = chooser_by_key(page)
        cuts = []

        def cut_once(route: Any) -> None:
            if route.request.method == "PUT" and not cuts:
                cuts.append(1)
                route.abort()
            else:
                route.continue_()

        page.route("**/api/uploads/**", cut_once)
        chooser.set_files(str(archive))
        page.get_by_text("files found =").wait_for(timeout=60_000)
        assert cuts and page.locator(".upload-words").inner_text() == "Ready"
        assert page.locator(".upload-name").inner_text() == archive.name
        assert page.locator(".upload-name b").count() == 0
        chosen = page.get_by_role("combobox", name="Data").input_value()
        assert Path(chosen).parent == tmp_path / "home" / "uploads"
        page.get_by_role("link", name="Train on it").click()
        page.get_by_role("button", name="Start", exact=True).wait_for(timeout=60_000)
        assert page.get_by_role("combobox", name="Data").input_value() == chosen


@pytest.mark.browser
def test_the_field_says_in_a_line_what_can_not_be_sent(running):
    with chromium_page() as page:
        page.goto(f"{running.url}/data")
        page.get_by_text("Upload an archive").click()
        page.locator(".upload-choose").wait_for(state="visible")

        def said(name: str, data: bytes) -> str:
            page.set_input_files(".upload-input", {"name": name, "mimeType": "", "buffer": data})
            page.locator(".upload-words.is-problem").wait_for()
            words = str(page.locator(".upload-words").inner_text())
            page.get_by_role("button", name="Close").click()
            page.locator(".upload-job").wait_for(state="hidden")
            return words

        assert "no .zip or .tar" in said("a.txt", b"x")
        assert "It is empty" in said("a.zip", b"")
        assert "neither a .zip nor a .tar" in said("a.zip", b"no archive")
        with begun(running, "one.zip", 10), begun(running, "two.zip", 10):
            assert "2 uploads are under way" in said("a.zip", packed())
        page.evaluate(
            """() => {
                const files = new DataTransfer();
                for (const name of ["a.zip", "b.zip"]) files.items.add(new File(["x"], name));
                const event = new DragEvent("drop", { dataTransfer: files, bubbles: true, cancelable: true });
                document.querySelector(".upload-drop").dispatchEvent(event);
            }"""
        )
        assert page.locator(".upload-words").inner_text() == "One archive at a time, please."


@pytest.mark.browser
def test_cancel_stops_it_and_leaves_nothing(running):
    with chromium_page() as page:
        page.goto(f"{running.url}/data")
        page.get_by_text("Upload an archive").click()
        page.locator(".upload-choose").wait_for(state="visible")
        hold = threading.Event()
        page.route("**/api/uploads/*?offset=*", lambda route: None if hold.is_set() else route.abort())
        page.set_input_files(".upload-input", {"name": "a.zip", "mimeType": "", "buffer": packed(20)})
        page.get_by_text("Connection lost").wait_for()
        page.get_by_role("button", name="Cancel").click()
        page.locator(".upload-job").wait_for(state="hidden")
        page.locator(".upload-choose").wait_for(state="visible")
    deadline = time.monotonic() + WAIT_S
    folder = running.log.parent / "uploads"
    while time.monotonic() < deadline and any(path.is_file() for path in folder.glob(f"{INCOMING}*/[!l]*")):
        time.sleep(0.05)
    assert not [path for path in folder.glob(f"{INCOMING}*/*") if path.name != "lock"]
