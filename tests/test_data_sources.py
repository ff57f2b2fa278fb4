"""Every kind of data SPEC becomes a folder of class folders; one contract for all, and what each refuses."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import pickle
import socket
import struct
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from core.data import builtin, download, huggingface, imagenet, torchvision_sets
from core.data.exports import unique_names
from core.data.sources import Source, locate, open_source
from core.errors import DataError

ROOT = Path(__file__).parents[1]


class Stop(Exception):
    """Raised from a progress function: the process is stopped half-way."""


@dataclass
class Server:
    """A real web server on this machine that stands for the internet.

    Attributes:
        files: path to content.
        cuts: how many answers end after half of what they promise.
        ranges: whether it answers a Range with the rest.
        lengths: whether it says how long an answer is.
        asked: the path and the Range header of each request.
    """

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    redirects: dict[str, str] = field(default_factory=dict)
    content_type: str = "application/octet-stream"
    cuts: int = 0
    ranges: bool = True
    lengths: bool = True
    status: int = 200
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    agents: set[str | None] = field(default_factory=set)

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        asked = request.headers.get("Range")
        self.asked.append((request.path, asked))
        self.agents.add(request.headers.get("User-Agent"))
        if request.path in self.redirects:
            request.send_response(302)
            request.send_header("Location", self.redirects[request.path])
            request.end_headers()
            return
        if self.status != 200 or request.path not in self.files:
            request.send_error(self.status if self.status != 200 else 404)
            return
        content = self.files[request.path]
        tag = f'"{hashlib.sha256(content).hexdigest()[:8]}"'
        start = 0
        if asked and self.ranges and request.headers.get("If-Range") == tag:
            start = int(asked.removeprefix("bytes=").rstrip("-"))
        if start >= len(content):
            request.send_response(416)
            request.send_header("Content-Range", f"bytes */{len(content)}")
            request.end_headers()
            return
        request.send_response(206 if start else 200)
        if start:
            request.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        if self.lengths:
            request.send_header("Content-Length", str(len(content) - start))
        request.send_header("Content-Type", self.content_type)
        request.send_header("ETag", tag)
        request.end_headers()
        rest = content[start:]
        if self.cuts:
            self.cuts -= 1
            rest = rest[: len(rest) // 2]
        request.wfile.write(rest)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.answer(self)

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(download, "PAUSE_S", 0.01)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        state.url = f"http://127.0.0.1:{running.server_port}"
        yield state
        running.shutdown()
        thread.join()


@pytest.fixture
def closed_port(monkeypatch: pytest.MonkeyPatch) -> str:
    """An address where nothing answers; it stands for a machine without network."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(download, "PAUSE_S", 0.01)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


def picture(seed: int, kind: str = "PNG") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    packed = io.BytesIO()
    Image.fromarray(pixels).save(packed, format=kind)
    return packed.getvalue()


def pictures(classes: tuple[str, ...] = ("cat", "dog"), count: int = 3, wrapper: str = "") -> dict[str, bytes]:
    return {
        f"{wrapper}{name}/{i}.png": picture(100 * label + i) for label, name in enumerate(classes) for i in range(count)
    }


def zip_bytes(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return packed.getvalue()


def tar_bytes(files: dict[str, bytes], mode: str = "w:gz") -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode=mode) as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return packed.getvalue()


def write_files(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


IMAGENETV2_FILES = pictures(("0", "9", "10", "999"), wrapper="imagenetv2-matched-frequency-format-val/")


@dataclass
class Given:
    """What a subject may use to lay its data out."""

    folder: Path
    home: Path
    server: Server
    monkeypatch: pytest.MonkeyPatch

    @property
    def torchvision(self) -> Path:
        return self.home / "downloads" / "torchvision"


def folder_subject(given: Given) -> str:
    return str(write_files(given.folder / "pets", pictures()))


def zip_subject(given: Given) -> str:
    path = given.folder / "pets.zip"
    path.write_bytes(zip_bytes(pictures() | {"../up.png": b"x"}))
    return str(path)


def tar_subject(given: Given) -> str:
    path = given.folder / "pets.tar.gz"
    path.write_bytes(tar_bytes(pictures() | {"../up.png": b"x"}))
    return str(path)


def zip_url_subject(given: Given) -> str:
    given.server.files["/a/pets.zip"] = zip_bytes(pictures())
    return f"{given.server.url}/a/pets.zip"


def tar_url_subject(given: Given) -> str:
    given.server.files["/get"] = tar_bytes(pictures(), "w:xz")
    given.server.redirects["/pets.tar"] = "/get"
    return f"{given.server.url}/pets.tar"


def idx(array: np.ndarray) -> bytes:
    return struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def fashion_files() -> dict[str, bytes]:
    """The four files of FashionMNIST, small: 20 training images and 10 test images."""
    random = np.random.default_rng(0)
    files = {}
    for name, count in (("train", 20), ("t10k", 10)):
        files[f"{name}-images-idx3-ubyte"] = idx(random.integers(0, 256, (count, 28, 28), dtype=np.uint8))
        files[f"{name}-labels-idx1-ubyte"] = idx(np.arange(count, dtype=np.uint8) % 10)
    return files


def fashion_subject(given: Given) -> str:
    write_files(given.torchvision / "FashionMNIST" / "raw", fashion_files())
    return "torchvision:FashionMNIST"


def fashion_download_subject(given: Given) -> str:
    """The server stands for FashionMNIST's; torchvision's own code checks, unpacks and reads the files."""
    from torchvision.datasets import FashionMNIST

    resources = []
    for name, content in fashion_files().items():
        packed = gzip.compress(content)
        given.server.files[f"/{name}.gz"] = packed
        resources.append((f"{name}.gz", hashlib.md5(packed).hexdigest()))
    given.monkeypatch.setattr(FashionMNIST, "mirrors", [f"{given.server.url}/"])
    given.monkeypatch.setattr(FashionMNIST, "resources", resources)
    return "torchvision:fashionmnist"


def dtd_files() -> dict[str, bytes]:
    files = {f"dtd/images/{name}/{name}_{i}.jpg": picture(i, "JPEG") for name in ("banded", "lined") for i in range(3)}
    for i, split in enumerate(("train", "val", "test")):
        files[f"dtd/labels/{split}1.txt"] = f"banded/banded_{i}.jpg\nlined/lined_{i}.jpg\n".encode()
    return files


def dtd_subject(given: Given) -> str:
    """The server stands for DTD's; the set is one of files."""
    from torchvision.datasets import DTD

    packed = tar_bytes(dtd_files())
    given.server.files["/dtd-r1.0.1.tar.gz"] = packed
    given.monkeypatch.setattr(DTD, "_URL", f"{given.server.url}/dtd-r1.0.1.tar.gz")
    given.monkeypatch.setattr(DTD, "_MD5", hashlib.md5(packed).hexdigest())
    return "torchvision:DTD"


def cifar_subject(given: Given) -> str:
    from torchvision.datasets import CIFAR10

    random = np.random.default_rng(0)
    files = {"batches.meta": pickle.dumps({"label_names": [f"class {i}" for i in range(10)]})}
    for name in [name for name, _ in CIFAR10.train_list + CIFAR10.test_list]:
        data = random.integers(0, 256, (10, 3072), dtype=np.uint8)
        files[name] = pickle.dumps({"data": data, "labels": list(range(10))})
    write_files(given.torchvision / "cifar-10-batches-py", files)
    sums = {name: hashlib.md5(content).hexdigest() for name, content in files.items()}
    for attribute in ("train_list", "test_list"):
        names = [name for name, _ in getattr(CIFAR10, attribute)]
        given.monkeypatch.setattr(CIFAR10, attribute, [[name, sums[name]] for name in names])
    given.monkeypatch.setattr(CIFAR10, "meta", CIFAR10.meta | {"md5": sums["batches.meta"]})
    return "torchvision:cifar10"


def eurosat_subject(given: Given) -> str:
    write_files(given.torchvision / "eurosat" / "2750", pictures(("Forest", "River", "SeaLake")))
    return "torchvision:EuroSAT"


def imagenetv2_archive_subject(given: Given) -> str:
    path = given.folder / "mine.tar.gz"
    path.write_bytes(tar_bytes(IMAGENETV2_FILES))
    return f"imagenetv2:{path}"


def imagenetv2_server_subject(given: Given) -> str:
    """The server stands for Hugging Face."""
    given.server.files["/imagenetv2-top-images.tar.gz"] = tar_bytes(IMAGENETV2_FILES)
    given.monkeypatch.setattr(imagenet, "IMAGENETV2_URL", given.server.url)
    return "imagenetv2:top-images"


def imagenetv2_folder_subject(given: Given) -> str:
    return str(write_files(given.folder / "some" / "where", IMAGENETV2_FILES))


def hf_rows(count: int, offset: int = 0) -> dict[str, list[Any]]:
    images = [{"bytes": picture(offset + i, "JPEG"), "path": None} for i in range(count)]
    return {"picture": images, "label": [i % 2 for i in range(count)]}


def write_parquet(folder: Path, splits: dict[str, dict[str, list[Any]]], label: Any = None) -> Path:
    import datasets

    folder.mkdir(parents=True, exist_ok=True)
    features = datasets.Features(
        {"picture": datasets.Image(), "label": label or datasets.ClassLabel(names=["cat/tom", "dog"])}
    )
    for split, rows in splits.items():
        datasets.Dataset.from_dict(rows, features=features).to_parquet(str(folder / f"{split}.parquet"))
    return folder


def hf_subject(given: Given) -> str:
    folder = given.folder / "hf set"
    return f"hf:{write_parquet(folder, {'train': hf_rows(8), 'validation': hf_rows(4, 50), 'test': hf_rows(4, 90)})}"


def hf_saved_subject(given: Given) -> str:
    import datasets

    features = datasets.Features({"image": datasets.Image(), "class": datasets.Value("string")})
    rows = {"image": hf_rows(6)["picture"], "class": ["b", "a", "c"] * 2}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(given.folder / "saved"))
    return f"hf:{given.folder / 'saved'}"


SUBJECTS: dict[str, tuple[Callable[[Given], str], int | None]] = {
    "folder": (folder_subject, None),
    "zip": (zip_subject, None),
    "tar": (tar_subject, None),
    "zip from a URL": (zip_url_subject, None),
    "tar from a redirected URL": (tar_url_subject, None),
    "torchvision:FashionMNIST": (fashion_subject, 10),
    "torchvision:FashionMNIST from a server": (fashion_download_subject, 10),
    "torchvision:DTD from a server": (dtd_subject, 2),
    "torchvision:CIFAR10": (cifar_subject, 10),
    "torchvision:EuroSAT": (eurosat_subject, 3),
    "imagenetv2:PATH": (imagenetv2_archive_subject, 1000),
    "imagenetv2 from a server": (imagenetv2_server_subject, 1000),
    "a folder that is ImageNetV2": (imagenetv2_folder_subject, 1000),
    "hf": (hf_subject, 2),
    "hf saved to disk": (hf_saved_subject, 3),
    "builtin:fashion-mnist": (lambda given: "builtin:fashion-mnist", None),
    "builtin:digits": (lambda given: "builtin:digits", 10),
}
"""Name to what lays the data out and gives the SPEC, and the number of fixed classes."""
WORKING = set(SUBJECTS) - {"folder", "a folder that is ImageNetV2"}
"""Those that have something to do before there is a folder."""


@pytest.fixture
def given(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> Given:
    (tmp_path / "given").mkdir()
    return Given(tmp_path / "given", tmp_path / "home", server, monkeypatch)


def all_below(folder: Path) -> dict[Path, int]:
    return {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}


def class_folders(root: Path) -> list[Path]:
    """The folders with images directly in them."""
    return sorted({path.parent for path in root.rglob("*") if path.is_file()})


class TestSourceContract:
    @pytest.fixture(params=SUBJECTS)
    def name(self, request: pytest.FixtureRequest) -> str:
        return request.param

    @pytest.fixture
    def spec(self, name: str, given: Given) -> str:
        return SUBJECTS[name][0](given)

    def test_it_is_located_without_reading(self, spec: str, given: Given):
        before = all_below(given.home)
        locate(spec)
        assert all_below(given.home) == before
        assert given.server.asked == []

    def test_it_becomes_a_folder_of_class_folders_with_readable_images(self, spec: str, given: Given):
        source = open_source(spec, given.home)
        assert (source.spec, source.root.is_absolute(), source.root.is_dir()) == (spec, True, True)
        folders = class_folders(source.root)
        assert len({folder.name for folder in folders}) >= 2
        for path in source.root.rglob("*"):
            if path.is_file() and path.stem != "LICENSE":
                with Image.open(path) as image:
                    image.load()

    def test_classes_are_fixed_where_the_folders_are_numbers(self, name: str, spec: str, given: Given):
        source = open_source(spec, given.home)
        count = SUBJECTS[name][1]
        assert (source.classes and len(source.classes)) == count
        if source.classes:
            assert len(set(source.classes)) == count
            numbers = {folder.name for folder in class_folders(source.root)}
            assert numbers <= {str(number) for number in range(len(source.classes))}

    def test_opening_twice_gives_the_same_and_writes_nothing(self, spec: str, given: Given):
        first = open_source(spec, given.home)
        before, asked = all_below(given.home), len(given.server.asked)
        assert open_source(spec, given.home) == first
        assert all_below(given.home) == before
        assert len(given.server.asked) == asked

    def test_stopped_anywhere_it_leaves_nothing_half_built(self, name: str, spec: str, given: Given):
        told: list[tuple[str, int, int]] = []
        whole = open_source(spec, given.home, lambda *progress: told.append(progress))
        assert bool(told) == (name in WORKING)
        expected = {path.relative_to(whole.root): path.read_bytes() for path in whole.root.rglob("*") if path.is_file()}
        places = {0, len(told) // 2, len(told) - 1} if len(expected) < 100 else {len(told) // 2}
        for place in sorted(places if told else ()):
            home = given.home.with_name(f"home{place}")
            if given.torchvision.is_dir() and not given.server.files:
                home.joinpath("downloads").mkdir(parents=True)
                os.symlink(given.torchvision, home / "downloads" / "torchvision")
            left = place

            def stop(*_: object) -> None:
                nonlocal left
                left -= 1
                if left < 0:
                    raise Stop

            with pytest.raises(Stop):
                open_source(spec, home, stop)
            again = open_source(spec, home)
            found = {
                path.relative_to(again.root): path.read_bytes() for path in again.root.rglob("*") if path.is_file()
            }
            assert found == expected
            assert [path for path in home.rglob("*") if ".building-" in path.name] == []


class TestFolders:
    def test_a_folder_is_used_where_it_is(self, given: Given):
        spec = folder_subject(given)
        assert open_source(spec, given.home) == Source(spec, (given.folder / "pets").resolve())
        assert not given.home.exists()

    def test_skipped_entries_of_an_archive_are_told_each_time(self, given: Given):
        for spec in (zip_subject(given), tar_subject(given)):
            for _ in range(2):
                [skipped] = open_source(spec, given.home).skipped
                assert (skipped.file, skipped.why) == ("../up.png", "unsafe_path")

    @pytest.mark.parametrize(
        ("spec", "problem"),
        [
            ("no/such/folder", "no/such/folder"),
            ("", "''"),
            ("builtin:nothing", "nothing"),
            ("torchvision:ImageNet21k", "ImageNet21k"),
            ("torchvision:StanfordCars", "StanfordCars"),
            ("torchvision:", "''"),
            ("imagenetv2:worst-images", "worst-images"),
            ("hf:", "hf:"),
            ("hf:a/b/c", "hf:a/b/c"),
            ("https://", "https://"),
            ("http://[::1/x.zip", "http://[::1/x.zip"),
            ("a\0b", "a\0b"),
            ("x" * 5000, "xxx"),
        ],
    )
    def test_what_is_not_there_is_named(self, spec: str, problem: str, tmp_path: Path):
        for ask in (lambda: locate(spec), lambda: open_source(spec, tmp_path)):
            with pytest.raises(DataError) as caught:
                ask()
            assert problem in caught.value.problem
            assert caught.value.fix
            assert "\n" not in str(caught.value)

    def test_a_file_that_is_no_archive(self, tmp_path: Path):
        (tmp_path / "notes.txt").write_text("hello")
        with pytest.raises(DataError, match=r"neither a folder nor a \.zip or \.tar"):
            locate(str(tmp_path / "notes.txt"))

    @pytest.mark.parametrize(
        ("module", "spec", "package"),
        [
            (huggingface, "hf:ylecun/mnist", "datasets"),
            (builtin, "builtin:digits", "scikit-learn"),
            (torchvision_sets, "torchvision:SVHN", "scipy"),
        ],
    )
    def test_a_package_that_is_not_installed_is_named(
        self, module: Any, spec: str, package: str, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
        with pytest.raises(DataError, match=f"needs the package {package}") as caught:
            locate(spec)
        assert f"pip install {package}" in caught.value.fix

    def test_a_home_that_is_a_file(self, given: Given):
        given.home.touch()
        for spec in (zip_subject(given), zip_url_subject(given), "builtin:digits"):
            with pytest.raises(DataError) as caught:
                open_source(spec, given.home)
            assert caught.value.fix


class TestDownloads:
    """The server stands for the internet."""

    def test_a_cut_connection_goes_on_where_it_ended(self, server: Server, tmp_path: Path):
        content = os.urandom(2_000_000)
        server.files["/x.bin"] = content
        server.cuts = 2
        seen: list[tuple[str, int, int]] = []
        path = download.fetch(f"{server.url}/x.bin", tmp_path, lambda *told: seen.append(told))
        assert path.read_bytes() == content
        assert [asked for _, asked in server.asked] == [None, "bytes=1000000-", "bytes=1500000-"]
        assert seen[-1] == ("downloading", 2_000_000, 2_000_000)
        assert {total for _, _, total in seen} == {2_000_000}
        assert [path.name for path in path.parent.iterdir()] == ["x.bin"]
        assert None not in server.agents

    def test_a_download_that_was_given_up_goes_on_the_next_time(self, server: Server, tmp_path: Path):
        server.files["/x.bin"] = os.urandom(2_000_000)

        def stop(what: str, done: int, total: int) -> None:
            if done > 1_000_000:
                raise Stop

        with pytest.raises(Stop):
            download.fetch(f"{server.url}/x.bin", tmp_path, stop)
        assert not download.place_of(f"{server.url}/x.bin", tmp_path).exists()
        assert download.fetch(f"{server.url}/x.bin", tmp_path).read_bytes() == server.files["/x.bin"]
        assert server.asked[1][1] is not None

    def test_the_rest_of_another_version_is_not_taken(self, server: Server, tmp_path: Path):
        server.files["/x.bin"] = bytes(2_000_000)

        def stop(what: str, done: int, total: int) -> None:
            raise Stop

        with pytest.raises(Stop):
            download.fetch(f"{server.url}/x.bin", tmp_path, stop)
        server.files["/x.bin"] = b"new" * 500_000
        assert download.fetch(f"{server.url}/x.bin", tmp_path).read_bytes() == b"new" * 500_000

    def test_a_server_without_ranges_starts_anew(self, server: Server, tmp_path: Path):
        server.files["/x.bin"] = os.urandom(500_000)
        server.cuts, server.ranges = 1, False
        assert download.fetch(f"{server.url}/x.bin", tmp_path).read_bytes() == server.files["/x.bin"]

    def test_a_download_that_was_whole_but_for_its_name_is_not_fetched_again(self, server: Server, tmp_path: Path):
        url = f"{server.url}/x.bin"
        server.files["/x.bin"] = os.urandom(1000)
        target = download.place_of(url, tmp_path)
        download.fetch(url, tmp_path).rename(target.with_name("x.bin.part"))
        tag = hashlib.sha256(server.files["/x.bin"]).hexdigest()[:8]
        target.with_name("x.bin.part.json").write_text(f'"\\"{tag}\\""')
        assert download.fetch(url, tmp_path).read_bytes() == server.files["/x.bin"]
        assert server.asked[1:] == [("/x.bin", "bytes=1000-")]

    def test_a_connection_that_is_cut_again_and_again_is_told_of(self, server: Server, tmp_path: Path):
        server.files["/x.bin"] = bytes(100)
        server.cuts, server.ranges = 99, False
        with pytest.raises(DataError, match="cut again and again"):
            download.fetch(f"{server.url}/x.bin", tmp_path)
        assert not download.place_of(f"{server.url}/x.bin", tmp_path).exists()
        assert len(server.asked) <= download.RETRIES + 2

    def test_two_at_once_fetch_once(self, server: Server, tmp_path: Path):
        server.files["/x.bin"] = os.urandom(3_000_000)
        paths: list[Path] = []
        threads = [
            threading.Thread(target=lambda: paths.append(download.fetch(f"{server.url}/x.bin", tmp_path)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(paths)) == 1
        assert len(paths) == 4
        assert len(server.asked) == 1
        assert paths[0].read_bytes() == server.files["/x.bin"]

    @pytest.mark.parametrize(
        ("status", "says"),
        [(404, "There is nothing at"), (403, "not open to everyone"), (500, "answers 500"), (418, "answers 418")],
    )
    def test_a_refusal_is_told_in_one_line(self, status: int, says: str, server: Server, tmp_path: Path):
        server.status = status
        with pytest.raises(DataError, match=says) as caught:
            open_source(f"{server.url}/x.zip", tmp_path)
        assert caught.value.fix
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == []

    def test_a_web_page_instead_of_an_archive(self, server: Server, tmp_path: Path):
        server.files["/x.zip"] = b"  <!DOCTYPE html><html>Sign in</html>"
        with pytest.raises(DataError, match="web page"):
            open_source(f"{server.url}/x.zip", tmp_path)
        server.files["/y.zip"] = b"Please sign in"
        server.content_type = "text/html; charset=utf-8"
        with pytest.raises(DataError, match="web page"):
            open_source(f"{server.url}/y.zip", tmp_path)
        assert [path for path in tmp_path.rglob("*") if path.suffix == ".zip"] == []

    def test_a_file_that_is_no_archive(self, server: Server, tmp_path: Path):
        server.files["/x.zip"] = b"hello"
        with pytest.raises(DataError, match="neither"):
            open_source(f"{server.url}/x.zip", tmp_path)
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == []

    def test_an_archive_that_came_damaged_is_fetched_anew_the_next_time(self, server: Server, tmp_path: Path):
        whole = zip_bytes(pictures())
        server.files["/x.zip"] = whole[: len(whole) // 2]
        server.lengths = False
        with pytest.raises(DataError, match="cut off or damaged"):
            open_source(f"{server.url}/x.zip", tmp_path)
        server.files["/x.zip"] = whole
        assert len(class_folders(open_source(f"{server.url}/x.zip", tmp_path).root)) == 2

    def test_a_wrong_checksum_is_refused(self, server: Server, tmp_path: Path):
        server.files["/x.bin"] = b"hello"
        with pytest.raises(DataError, match="other bytes than expected"):
            download.fetch(f"{server.url}/x.bin", tmp_path, md5="0" * 32)
        md5 = hashlib.md5(b"hello").hexdigest()
        assert download.fetch(f"{server.url}/x.bin", tmp_path, md5=md5).read_bytes() == b"hello"

    def test_a_full_disk_is_told_before(self, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        server.files["/x.bin"] = bytes(600)
        monkeypatch.setattr(download.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 500}))
        with pytest.raises(DataError, match="left"):
            download.fetch(f"{server.url}/x.bin", tmp_path)

    def test_no_network(self, closed_port: str, tmp_path: Path):
        with pytest.raises(DataError, match=r"127\.0\.0\.1 can't be reached") as caught:
            open_source(f"{closed_port}/x.zip", tmp_path)
        assert "network" in caught.value.fix
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == []

    def test_an_unknown_host(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        """The resolver that fails stands for a machine without network."""

        def fail(*_: object, **__: object) -> None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

        monkeypatch.setenv("no_proxy", "*")
        monkeypatch.setattr(socket, "getaddrinfo", fail)
        with pytest.raises(DataError, match=r"example\.invalid is not found; is there no network"):
            open_source("https://example.invalid/x.zip", tmp_path)

    @pytest.mark.parametrize(
        ("url", "name"),
        [
            ("https://h/a/x.zip?download=true#top", "x.zip"),
            ("https://h", "download"),
            ("https://h/%2e%2e%2f%00x.zip", "_x.zip"),
            ("https://h/..", "download"),
        ],
    )
    def test_a_url_gives_a_name_that_is_safe(self, url: str, name: str):
        assert download.name_of(url) == name


class TestTorchvision:
    def test_files_are_kept_bit_by_bit_and_all_three_splits(self, given: Given):
        source = open_source(dtd_subject(given), given.home)
        assert source.classes == ("banded", "lined")
        assert sorted(path.name for path in source.root.iterdir()) == ["test", "train", "val"]
        assert (source.root / "val" / "1" / "000001.jpg").read_bytes() == dtd_files()["dtd/images/lined/lined_1.jpg"]

    def test_pixels_are_written_as_they_are_and_the_test_images_validate(self, given: Given):
        source = open_source(fashion_subject(given), given.home)
        assert source.classes and source.classes[0] == "T-shirt/top"
        assert "test images serve for validation" in source.about
        assert sorted(path.name for path in source.root.iterdir()) == ["train", "val"]
        stored = np.frombuffer(fashion_files()["t10k-images-idx3-ubyte"][16:], np.uint8).reshape(10, 28, 28)
        assert np.array_equal(np.asarray(Image.open(source.root / "val" / "3" / "000003.png")), stored[3])

    def test_colours_are_in_order(self, given: Given):
        source = open_source(cifar_subject(given), given.home)
        batch = pickle.loads((given.torchvision / "cifar-10-batches-py" / "test_batch").read_bytes())
        expected = batch["data"][4].reshape(3, 32, 32).transpose(1, 2, 0)
        assert np.array_equal(np.asarray(Image.open(source.root / "val" / "4" / "000004.png")), expected)

    def test_a_set_without_splits_has_its_class_folders_at_the_top(self, given: Given):
        source = open_source(eurosat_subject(given), given.home)
        assert sorted(path.name for path in source.root.iterdir()) == ["0", "1", "2"]
        assert source.classes == ("Forest", "River", "SeaLake")

    def test_the_raw_files_stay_and_standard_output_is_clean(self, given: Given, capfd: pytest.CaptureFixture[str]):
        open_source(dtd_subject(given), given.home)
        assert (given.torchvision / "dtd" / "dtd" / "images").is_dir()
        assert capfd.readouterr().out == ""

    def test_unpacked_half_way_it_is_unpacked_anew(self, given: Given):
        spec = dtd_subject(given)
        (given.torchvision / "dtd" / "dtd" / "images").mkdir(parents=True)
        assert len(class_folders(open_source(spec, given.home).root)) == 6

    def test_an_archive_that_someone_has_put_there_is_used(self, given: Given):
        spec = dtd_subject(given)
        write_files(given.torchvision / "dtd", {"dtd-r1.0.1.tar.gz": given.server.files["/dtd-r1.0.1.tar.gz"]})
        assert len(class_folders(open_source(spec, given.home).root)) == 6
        assert given.server.asked == []

    def test_a_file_that_is_missing_is_named(self, given: Given):
        write_files(given.torchvision / "dtd", dtd_files())
        (given.torchvision / "dtd" / "dtd" / "images" / "lined" / "lined_1.jpg").unlink()
        with pytest.raises(DataError, match=r"missing: .*lined_1"):
            open_source("torchvision:DTD", given.home)
        assert not any((given.home / "data").iterdir())

    def test_no_network(self, closed_port: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        from torchvision.datasets import MNIST

        monkeypatch.setattr(MNIST, "mirrors", [f"{closed_port}/a/", f"{closed_port}/b/"])
        with pytest.raises(DataError, match="can't be reached") as caught:
            open_source("torchvision:mnist", tmp_path)
        assert "network" in caught.value.fix

    @pytest.mark.parametrize("name", torchvision_sets.TORCHVISION_SETS)
    def test_each_set_says_which_files_it_is_made_of(self, name: str):
        """The files are named as torchvision 0.24 names them, so that it finds them and does not download itself."""
        from torchvision import datasets

        files = torchvision_sets._SETS[name].files(getattr(datasets, name))
        assert files
        for file in files:
            assert all(url.startswith(("http://", "https://")) for url in file.urls)
            assert file.place.rsplit("/", 1)[-1] == file.urls[0].rsplit("/", 1)[-1]
            assert len(file.md5) == (0 if name == "FGVCAircraft" else 32)


class TestImageNetV2:
    def test_a_folder_number_is_the_label(self, given: Given):
        source = open_source(imagenetv2_archive_subject(given), given.home)
        assert source.classes
        assert [source.classes[number] for number in (0, 9, 10, 999)] == [
            "tench",
            "ostrich",
            "brambling",
            "toilet tissue",
        ]
        assert {folder.name for folder in class_folders(source.root)} == {"0", "9", "10", "999"}

    def test_it_says_what_its_size_allows_to_say(self, given: Given):
        about = open_source(imagenetv2_server_subject(given), given.home).about
        half_width = 100 * 1.96 * (0.7 * 0.3 / 2000) ** 0.5
        assert f"±{half_width:.0f} points" in about
        assert "8 images to train on and 2 to validate" in about

    def test_a_plain_archive_is_recognised_by_its_name_and_its_classes(self, given: Given):
        for name, files, is_it in (
            ("imagenetv2-threshold0.7.tar", pictures(("0", "5")), True),
            ("x.tar", IMAGENETV2_FILES, True),
            ("x2.tar", pictures(("0", "5")), False),
            ("imagenetv2.tar", pictures(("0", "cat")), False),
            ("imagenetv2b.tar", pictures(("0", "1000")), False),
        ):
            path = given.folder / name
            path.write_bytes(tar_bytes(files, "w"))
            assert (open_source(str(path), given.home).classes is not None) == is_it, name

    def test_what_is_not_imagenetv2_is_refused(self, given: Given):
        with pytest.raises(DataError, match="not called 0 to 999"):
            open_source(f"imagenetv2:{folder_subject(given)}", given.home)

    def test_no_network(self, closed_port: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(imagenet, "IMAGENETV2_URL", closed_port)
        with pytest.raises(DataError, match="can't be reached"):
            open_source("imagenetv2", tmp_path)

    @pytest.mark.parametrize(
        ("variant", "file"),
        [("", "matched-frequency"), ("threshold-0.7", "threshold0.7"), ("top-images", "top-images")],
    )
    def test_the_official_archives(self, variant: str, file: str):
        assert imagenet.imagenetv2_url(variant) == (
            f"https://huggingface.co/datasets/vaishaal/ImageNetV2/resolve/main/imagenetv2-{file}.tar.gz"
        )


class TestHuggingFace:
    """Folders that `datasets` reads stand for sets of the Hub."""

    def test_bytes_are_kept_and_class_names_too(self, given: Given):
        source = open_source(hf_subject(given), given.home)
        assert source.classes == ("cat/tom", "dog")
        assert sorted(path.name for path in source.root.iterdir()) == ["test", "train", "val"]
        assert (source.root / "val" / "1" / "000001.jpg").read_bytes() == picture(51, "JPEG")

    def test_test_images_validate_where_there_is_no_validation(self, given: Given):
        spec = f"hf:{write_parquet(given.folder / 'd', {'train': hf_rows(4), 'test': hf_rows(4)})}"
        source = open_source(spec, given.home)
        assert sorted(path.name for path in source.root.iterdir()) == ["train", "val"]
        assert "test images serve for validation" in source.about

    def test_one_split_alone_has_its_class_folders_at_the_top(self, given: Given):
        source = open_source(f"hf:{write_parquet(given.folder / 'd', {'train': hf_rows(4)})}", given.home)
        assert sorted(path.name for path in source.root.iterdir()) == ["0", "1"]

    def test_images_without_a_label_are_left_out_and_counted(self, given: Given):
        test = hf_rows(3)
        test["label"] = [-1, -1, -1]
        spec = f"hf:{write_parquet(given.folder / 'd', {'train': hf_rows(4), 'test': test})}"
        source = open_source(spec, given.home)
        assert "3 images without a label are left out" in source.about
        assert sorted(path.name for path in source.root.iterdir()) == ["0", "1"]

    def test_other_splits_are_named(self, given: Given):
        splits = {"train": hf_rows(4), "validation": hf_rows(4)}
        folder = write_parquet(given.folder / "d", splits)
        import datasets

        loaded = datasets.load_dataset(str(folder), cache_dir=str(given.folder / "cache"))
        loaded["extra"] = loaded["train"]
        loaded.save_to_disk(str(given.folder / "saved"))
        assert "Not used: extra." in open_source(f"hf:{given.folder / 'saved'}", given.home).about

    def test_whole_numbers_without_names_are_classes_in_order(self, given: Given):
        import datasets

        rows = hf_rows(4)
        rows["label"] = [10, 9, 10, 9]
        folder = write_parquet(given.folder / "d", {"train": rows}, datasets.Value("int64"))
        source = open_source(f"hf:{folder}", given.home)
        assert source.classes == ("9", "10")
        assert (source.root / "1" / "000000.jpg").read_bytes() == rows["picture"][0]["bytes"]

    def test_a_folder_of_images_is_read_by_datasets_too(self, given: Given):
        folder = write_files(given.folder / "d", pictures())
        source = open_source(f"hf:{folder}", given.home)
        assert source.classes == ("cat", "dog")
        assert (source.root / "0" / "000000.png").read_bytes() == pictures()["cat/0.png"]

    def test_columns_that_tell_nothing_are_named(self, given: Given):
        import datasets

        plain = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]})
        plain.save_to_disk(str(given.folder / "text"))
        with pytest.raises(DataError, match=r"no column of images \(its columns: text, label\)"):
            open_source(f"hf:{given.folder / 'text'}", given.home)

    def test_of_two_label_columns_the_finer_one_is_taken(self, given: Given):
        import datasets

        kinds = {"coarse": datasets.ClassLabel(num_classes=2), "fine": datasets.ClassLabel(num_classes=3)}
        rows = {"img": hf_rows(3)["picture"], "coarse": [0, 1, 1], "fine": [0, 1, 2]}
        both = datasets.Dataset.from_dict(rows, features=datasets.Features({"img": datasets.Image(), **kinds}))
        both.save_to_disk(str(given.folder / "both"))
        assert open_source(f"hf:{given.folder / 'both'}", given.home).classes == ("0", "1", "2")

    def test_what_changed_in_a_folder_is_exported_anew(self, given: Given):
        folder = write_parquet(given.folder / "d", {"train": hf_rows(4)})
        first = open_source(f"hf:{folder}", given.home)
        write_parquet(folder, {"train": hf_rows(6)})
        assert open_source(f"hf:{folder}", given.home).root != first.root

    def test_no_network(self, given: Given, monkeypatch: pytest.MonkeyPatch):
        """What `datasets` raises without network stands for its absence."""
        import datasets

        def fail(*_: object, **__: object) -> None:
            raise ConnectionError("Couldn't reach 'a/b' on the Hub\n(LocalEntryNotFoundError)")

        monkeypatch.setattr(datasets, "load_dataset", fail)
        with pytest.raises(DataError, match="'hf:a/b' can't be loaded: Couldn't reach") as caught:
            open_source("hf:a/b", given.home)
        assert "network" in caught.value.fix
        assert "\n" not in str(caught.value)

    def test_a_set_that_cannot_be_loaded_is_told_in_one_line(self, given: Given):
        (given.folder / "empty").mkdir()
        with pytest.raises(DataError, match="can't be loaded") as caught:
            open_source(f"hf:{given.folder / 'empty'}", given.home)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("name", "parts"),
        [("mnist", ("mnist", None)), ("a/b", ("a/b", None)), ("a/b:c", ("a/b", "c")), ("a/b.c-d:e:f", None)],
    )
    def test_a_name_has_a_repository_and_perhaps_a_config(self, name: str, parts: tuple[str, str | None] | None):
        if parts is None:
            with pytest.raises(DataError):
                huggingface.locate_hf(name)
        else:
            assert huggingface.locate_hf(name) == parts


def test_digits_are_scaled_to_the_whole_range(tmp_path: Path):
    source = open_source("builtin:digits", tmp_path)
    images = [np.asarray(Image.open(path)) for path in source.root.rglob("*.png")]
    assert (len(images), images[0].shape) == (1797, (8, 8))
    assert (min(image.min() for image in images), max(image.max() for image in images)) == (0, 255)
    assert source.classes == tuple("0123456789")


def test_names_that_several_classes_bear_get_their_numbers():
    assert unique_names(["crane", "owl", "crane"]) == ["crane (0)", "owl", "crane (2)"]


def test_locating_imports_nothing_heavy(tmp_path: Path):
    specs = ["builtin:digits", "torchvision:SVHN", "imagenetv2", "hf:a/b", "https://h/x.zip", str(tmp_path)]
    code = (
        "import sys\n"
        "from core.data.sources import locate\n"
        f"for spec in {specs}: locate(spec)\n"
        "print({'torch', 'torchvision', 'datasets', 'sklearn', 'scipy', 'numpy', 'PIL'} & set(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert ran.stdout == "set()\n"
