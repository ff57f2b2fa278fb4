"""Archives: names, places, damage and limits."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import random
import stat
import struct
import tarfile
import unicodedata
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from core.data import archives
from core.data.archives import DamagedArchiveError, Skipped, kind_of, stem_of, unpack
from core.errors import DataError

CASES = Path(__file__).parent / "data" / "cases"


def raw_zip(path: Path, entries: list[tuple[bytes, bytes, bytes]], flags: int = 0) -> Path:
    """A zip of stored entries: name in any encoding, content, extra field."""
    local, central = b"", b""
    for name, content, extra in entries:
        facts = struct.pack("<LLLHH", zlib.crc32(content), len(content), len(content), len(name), len(extra))
        offset = len(local)
        local += b"PK\3\4" + struct.pack("<HHHHH", 20, flags, 0, 0, 33) + facts + name + extra + content
        central += b"PK\1\2" + struct.pack("<HHHHHH", 20, 20, flags, 0, 0, 33) + facts
        central += struct.pack("<HHHLL", 0, 0, 0, 0, offset) + name + extra
    count = len(entries)
    end = b"PK\5\6" + struct.pack("<HHHHLLH", 0, 0, count, count, len(central), len(local), 0)
    path.write_bytes(local + central + end)
    return path


def zip_of(path: Path, files: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def tar_of(path: Path, members: list[tarfile.TarInfo | tuple[str, bytes]], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                archive.addfile(member)
            else:
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                archive.addfile(info, io.BytesIO(member[1]))
    return path


def opened(path: Path, tmp_path: Path) -> tuple[list[str], list[tuple[str, str]]]:
    """The files that were written, and what was skipped."""
    unpacked = unpack(str(path), path, tmp_path / "home")
    files = [file.relative_to(unpacked.root).as_posix() for file in unpacked.root.rglob("*") if file.is_file()]
    return sorted(files), [(item.file, item.why) for item in unpacked.skipped]


def noise(count: int) -> bytes:
    return random.Random(count).randbytes(count)


class TestNames:
    def test_flagged_names_are_utf8_and_written_in_nfc(self, tmp_path: Path):
        decomposed = unicodedata.normalize("NFD", "é/ö.png")
        path = raw_zip(tmp_path / "x.zip", [(decomposed.encode(), b"x", b"")], flags=0x800)
        assert opened(path, tmp_path) == (["é/ö.png"], [])

    def test_unflagged_names_are_utf8_where_all_of_them_may_be(self, tmp_path: Path):
        names = ["猫/1.png", "犬/1.png"]
        path = raw_zip(tmp_path / "x.zip", [(name.encode(), b"x", b"") for name in names])
        assert opened(path, tmp_path)[0] == sorted(names)

    def test_else_all_are_cp932_where_all_of_them_may_be(self, tmp_path: Path):
        names = ["ﾈｺ/1.png", "能登/2.png"]
        assert names[0].encode("cp932").decode("utf-8")
        path = raw_zip(tmp_path / "x.zip", [(name.encode("cp932"), b"x", b"") for name in names])
        assert opened(path, tmp_path)[0] == sorted(names)

    @pytest.mark.parametrize("names", [["Bär/1.png", "Bär/é.png", "Kuh/1.png"], ["Çà.png", "thé/1.png"]])
    def test_else_all_are_cp437_where_that_gives_letters(self, names: list[str], tmp_path: Path):
        path = raw_zip(tmp_path / "x.zip", [(name.encode("cp437"), b"x", b"") for name in names])
        assert opened(path, tmp_path)[0] == sorted(names)

    def test_a_name_of_nonsense_leaves_the_others_cp932(self, tmp_path: Path):
        names = [b"/1.png", b"/\xff\xfe.png", b"/\x82.png"]
        path = raw_zip(tmp_path / "x.zip", [("犬".encode("cp932") + name, b"x", b"") for name in names])
        assert {Path(file).parent.name for file in opened(path, tmp_path)[0]} == {"犬"}

    def test_else_each_folder_and_file_is_utf8_cp932_or_cp437(self, tmp_path: Path):
        names = [("猫/1.png", "cp932"), ("Ä.png", "utf-8"), ("café.png", "cp437"), ("plain.png", "ascii")]
        path = raw_zip(tmp_path / "x.zip", [(name.encode(encoding), b"x", b"") for name, encoding in names])
        assert opened(path, tmp_path)[0] == sorted(name for name, _ in names)

    @pytest.mark.parametrize("separator", [b"/", b"\\"])
    def test_a_folder_s_bytes_are_never_decoded_in_two_ways(self, separator: bytes, tmp_path: Path):
        folders = [name.encode(encoding) for name, encoding in (("Bär", "cp437"), ("ä", "utf-8"), ("猫", "cp932"))]
        files = [b"1.png", "é.png".encode("cp437"), "é.png".encode(), "犬.png".encode("cp932"), b"\xff\xfe.png"]
        names = [folder + separator + file for folder in folders for file in files]
        path = raw_zip(tmp_path / "x.zip", [(name, b"x", b"") for name in names])
        folders_there = {Path(file).parent.name for file in opened(path, tmp_path)[0]}
        assert (len(folders_there), {"ä", "猫"} - folders_there) == (3, set())

    def test_names_that_say_utf8_and_are_not(self, tmp_path: Path):
        entries = [(f"{folder}/{i}.png".encode(encoding), noise(9000), b"") for i in range(3) for folder, encoding in
                   (("犬", "cp932"), ("猫", "utf-8"), ("plain", "ascii"))]  # fmt: skip
        path = raw_zip(tmp_path / "x.zip", entries, flags=0x800)
        assert opened(path, tmp_path) == (sorted(f"{x}/{i}.png" for x in ("犬", "猫", "plain") for i in range(3)), [])

    def test_a_cp932_backslash_byte_within_a_character_is_no_separator(self, tmp_path: Path):
        assert b"\\" in "表".encode("cp932")
        path = raw_zip(tmp_path / "x.zip", [("表/ソ.png".encode("cp932"), b"x", b"")])
        assert opened(path, tmp_path)[0] == ["表/ソ.png"]

    def test_the_unicode_path_field_counts_where_it_belongs_to_the_name(self, tmp_path: Path):
        def field(name: bytes, unicode_name: str) -> bytes:
            body = b"\1" + struct.pack("<L", zlib.crc32(name)) + unicode_name.encode()
            return struct.pack("<HH", 0x9999, 2) + b"ab" + struct.pack("<HH", 0x7075, len(body)) + body

        entries = [(b"a.png", b"x", field(b"a.png", "ж.png")), (b"b.png", b"x", field(b"other", "ш.png"))]
        assert opened(raw_zip(tmp_path / "x.zip", entries), tmp_path)[0] == ["b.png", "ж.png"]

    def test_backslashes_are_separators(self, tmp_path: Path):
        path = zip_of(tmp_path / "x.zip", {r"a\in.png": b"x", "b\\": b""})
        assert opened(path, tmp_path) == (["a/in.png"], [])

    def test_names_of_a_tar_are_read_as_utf8_else_cp932(self, tmp_path: Path):
        path = tmp_path / "x.tar"
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT, encoding="cp932") as archive:
            archive.addfile(tarfile.TarInfo("猫.png"))
        assert opened(path, tmp_path)[0] == ["猫.png"]

    def test_a_tar_s_folder_is_never_decoded_in_two_ways(self, tmp_path: Path):
        path = tmp_path / "x.tar"
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT, encoding="cp437") as archive:
            for name in ("Bär/1.png", "Bär/é.png"):
                archive.addfile(tarfile.TarInfo(name))
        assert len({Path(file).parent for file in opened(path, tmp_path)[0]}) == 1

    @pytest.mark.parametrize(
        "name", ["x.zip", "x.tar", "x.tar.gz", "x.tgz", "x.TAR.BZ2", "x.tbz2", "x.tar.xz", "x.txz"]
    )
    def test_the_stem_is_the_name_without_endings(self, name: str):
        assert (stem_of(name), stem_of("imagenetv2-0.7.tar.gz")) == ("x", "imagenetv2-0.7")


class TestPlaces:
    def test_nothing_is_written_outside(self, tmp_path: Path):
        source = unpack("x", CASES / "zip_slip" / "data.zip", tmp_path / "a" / "b" / "home")
        written = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert sum(path.is_relative_to(source.root) for path in written) == 8
        assert all(path.is_relative_to(tmp_path / "a" / "b" / "home" / "data") for path in written)
        assert not Path("/tmp/escaped_shared_abs.png").exists()
        assert {item.why for item in source.skipped} == {"unsafe_path"}

    @pytest.mark.parametrize(
        "name", ["/a.png", "../a.png", "a/../../b.png", "C:/a.png", "c:a.png", r"\\host\a.png", r"..\a"]
    )
    def test_unsafe_names(self, name: str, tmp_path: Path):
        in_zip = zip_of(tmp_path / "x.zip", {name: b"x", "ok/a.png": b"x"})
        in_tar = tar_of(tmp_path / "x.tar", [(name, b"x"), ("ok/a.png", b"x")])
        for path in (in_zip, in_tar):
            assert opened(path, tmp_path) == (["ok/a.png"], [(name, "unsafe_path")])

    def test_a_name_with_a_nul(self, tmp_path: Path):
        path = raw_zip(tmp_path / "x.zip", [(b"a.png\0.exe", b"x", b""), (b"b.png", b"x", b"")])
        assert opened(path, tmp_path) == (["b.png"], [("a.png\0.exe", "unsafe_path")])

    def test_links_and_devices_of_a_zip(self, tmp_path: Path):
        path = tmp_path / "x.zip"
        with zipfile.ZipFile(path, "w") as archive:
            for name, kind in (("link", stat.S_IFLNK), ("pipe", stat.S_IFIFO), ("disk", stat.S_IFBLK)):
                info = zipfile.ZipInfo(name)
                info.external_attr = (kind | 0o777) << 16
                archive.writestr(info, "/etc/passwd")
            archive.writestr("a.png", b"x")
        assert opened(path, tmp_path) == (["a.png"], [(name, "unsafe_path") for name in ("link", "pipe", "disk")])

    def test_links_and_devices_of_a_tar(self, tmp_path: Path):
        members: list[tarfile.TarInfo | tuple[str, bytes]] = [("a.png", b"x")]
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE):
            info = tarfile.TarInfo(f"special{kind.decode()}")
            info.type, info.linkname = kind, "a.png"
            members.append(info)
        files, skipped = opened(tar_of(tmp_path / "x.tar", members), tmp_path)
        assert (files, {why for _, why in skipped}, len(skipped)) == (["a.png"], {"unsafe_path"}, 5)

    def test_what_lies_below_a_link_is_skipped_with_it(self, tmp_path: Path):
        below = ["link/a.png", "./link/in/b.png", "link/"]
        kept = ["link.png", "linked/a.png", "a/link/a.png"]
        in_zip, in_tar = tmp_path / "x.zip", tarfile.TarInfo("./link")
        in_tar.type, in_tar.linkname = tarfile.SYMTYPE, "/etc"
        with zipfile.ZipFile(in_zip, "w") as archive:
            info = zipfile.ZipInfo("link")
            info.external_attr = (stat.S_IFLNK | 0o777) << 16
            archive.writestr(info, "/etc")
            for name in below + kept:
                archive.writestr(name, b"")
        folder = tarfile.TarInfo(below[-1])
        folder.type = tarfile.DIRTYPE
        members = [in_tar, *((name, b"x") for name in below[:-1]), folder, *((name, b"x") for name in kept)]
        for path in (in_zip, tar_of(tmp_path / "x.tar", members)):
            files, skipped = opened(path, tmp_path)
            assert (files, [why for _, why in skipped]) == (sorted(kept), ["unsafe_path"] * 4)
            assert not (unpack("x", path, tmp_path / "home").root / "link").exists()

    def test_a_second_entry_on_the_same_path_is_skipped(self, tmp_path: Path):
        path = raw_zip(
            tmp_path / "x.zip",
            [(b"a/b.png", b"first", b""), (b"a/./b.png", b"second", b""), (rb"a\b.png", b"third", b"")],
        )
        unpacked = unpack("x", path, tmp_path)
        assert unpacked.skipped == (Skipped("a/./b.png", "duplicate_name"), Skipped(r"a\b.png", "duplicate_name"))
        assert (unpacked.root / "a" / "b.png").read_bytes() == b"first"

    def test_two_spellings_of_one_name_are_the_same_path(self, tmp_path: Path):
        spellings = [unicodedata.normalize(form, "é.png").encode() for form in ("NFC", "NFD")]
        path = raw_zip(tmp_path / "x.zip", [(name, b"x", b"") for name in spellings], flags=0x800)
        assert opened(path, tmp_path) == (["é.png"], [("é.png", "duplicate_name")])

    def test_a_file_where_a_folder_is_and_the_other_way_round(self, tmp_path: Path):
        for i, names in enumerate((["a", "a/b.png"], ["a/b.png", "a"], ["a", "a/b/c.png"], ["a", "a/"])):
            path = zip_of(tmp_path / f"{i}.zip", dict.fromkeys(names, b"x"))
            assert opened(path, tmp_path) == ([names[0]], [(names[1], "unsafe_path")])

    def test_a_name_too_long_for_the_disk(self, tmp_path: Path):
        name = f"a/{'n' * 300}.png"
        for path in (
            zip_of(tmp_path / "x.zip", {name: b"x", "a/b.png": b"x"}),
            tar_of(tmp_path / "x.tar", [(name, b"x"), ("a/b.png", b"x")]),
        ):
            assert opened(path, tmp_path) == (["a/b.png"], [(name, "name_too_long")])

    def test_a_name_too_deep(self, tmp_path: Path):
        deep, deepest = "a/" * 100 + "b.png", "a/" * 1500 + "b.png"
        files = {deep: b"x", deepest: b"x", "a/" * 1500: b"", f"{'c/' * 101}d.png": b"x"}
        for path in (
            zip_of(tmp_path / "x.zip", files),
            tar_of(tmp_path / "x.tar", [(name, b"x") for name in files if name.endswith(".png")]),
        ):
            written, skipped = opened(path, tmp_path)
            assert (written, {why for _, why in skipped}) == ([deep], {"name_too_long"})

    def test_empty_folders_are_made_and_rights_are_not_taken_over(self, tmp_path: Path):
        folder, file = tarfile.TarInfo("empty"), tarfile.TarInfo("shut/a.png")
        folder.type, folder.mode = tarfile.DIRTYPE, 0
        file.mode, file.uid = 0, 12345
        in_tar = tar_of(tmp_path / "x.tar", [folder, file])
        in_zip = zip_of(tmp_path / "x.zip", {"empty/": b"", "shut/a.png": b""})
        for path in (in_tar, in_zip):
            root = unpack("x", path, tmp_path).root
            assert (root / "empty").is_dir()
            assert stat.S_IMODE((root / "empty").stat().st_mode) & 0o700 == 0o700
            assert stat.S_IMODE((root / "shut" / "a.png").stat().st_mode) & 0o600 == 0o600
            assert (root / "shut" / "a.png").stat().st_uid == os.getuid()

    def test_an_archive_in_an_archive_stays_one(self, tmp_path: Path):
        inner = zip_of(tmp_path / "inner.zip", {"a.png": b"x"}).read_bytes()
        path = tar_of(tmp_path / "x.tar", [("inner.zip", inner)])
        assert kind_of(path) == "tar"
        assert opened(path, tmp_path)[0] == ["inner.zip"]


class TestDamage:
    @pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    def test_one_damaged_entry_is_skipped_alone(self, method: int, tmp_path: Path):
        files = {f"{i}.png": noise(5000 + i) for i in range(3)}
        path = zip_of(tmp_path / "x.zip", files, method)
        with zipfile.ZipFile(path) as archive:
            start = archive.getinfo("1.png").header_offset
        content = bytearray(path.read_bytes())
        content[start + 1000 : start + 1100] = bytes(100)
        path.write_bytes(content)
        assert opened(path, tmp_path) == (["0.png", "2.png"], [("1.png", "truncated")])

    def test_an_unknown_compression_is_skipped_alone(self, tmp_path: Path):
        path = zip_of(tmp_path / "x.zip", {"a.png": b"x", "b.png": b"y"})
        content = bytearray(path.read_bytes())
        content[content.index(b"PK\1\2") + 10] = 9
        path.write_bytes(content)
        assert opened(path, tmp_path) == (["b.png"], [("a.png", "unknown_compression")])
        content[content.rindex(b"PK\1\2") + 10] = 9
        path.write_bytes(content)
        assert opened(path, tmp_path) == ([], [("a.png", "unknown_compression"), ("b.png", "unknown_compression")])

    def test_an_entry_whose_place_is_wrong_is_skipped_alone(self, tmp_path: Path):
        path = zip_of(tmp_path / "x.zip", {"a.png": b"x", "b.png": b"y"})
        content = bytearray(path.read_bytes())
        at = content.index(b"PK\1\2") + 42
        content[at : at + 4] = struct.pack("<L", 2**31 - 5)
        path.write_bytes(content)
        assert opened(path, tmp_path) == (["b.png"], [("a.png", "truncated")])

    def test_encrypted_entries_are_skipped_and_a_wholly_encrypted_zip_is_refused(self, tmp_path: Path):
        part = zip_of(tmp_path / "part.zip", {"a.png": b"x", "b.png": b"y"})
        content = bytearray(part.read_bytes())
        content[content.index(b"PK\1\2") + 8] |= 1
        part.write_bytes(content)
        assert opened(part, tmp_path) == (["b.png"], [("a.png", "encrypted")])
        content[content.index(b"PK\1\2", content.index(b"PK\1\2") + 4) + 8] |= 1
        part.write_bytes(content)
        with pytest.raises(DataError, match="protected by a password"):
            opened(part, tmp_path)

    def test_a_cut_zip_is_refused(self, tmp_path: Path):
        path = zip_of(tmp_path / "x.zip", {f"{i}.png": noise(1000) for i in range(9)})
        path.write_bytes(path.read_bytes()[:-200])
        with pytest.raises(DamagedArchiveError, match="cut off or damaged"):
            opened(path, tmp_path)
        assert list((tmp_path / "home" / "data").iterdir()) == []

    @pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, lzma.compress])
    def test_a_cut_tar_is_refused_wherever_it_is_cut(self, pack: Callable[[bytes], bytes], tmp_path: Path):
        whole = tar_of(tmp_path / "x.tar", [(f"{i}.png", noise(3000 + i)) for i in range(5)]).read_bytes()
        packed = pack(whole)
        # within a header, within a file, at the border of two files
        cuts = [len(packed) // 3, len(packed) // 2 + 7]
        if pack is bytes:
            cuts += [512 + 3072, 512 + 3072 + 100, 512]
        for cut in cuts:
            path = tmp_path / f"cut{cut}"
            path.write_bytes(packed[:cut])
            with pytest.raises(DamagedArchiveError) as caught:
                opened(path, tmp_path)
            assert caught.value.fix
        assert list((tmp_path / "home" / "data").iterdir()) == []

    def test_a_tar_with_a_garbled_header_is_refused(self, tmp_path: Path):
        content = bytearray(tar_of(tmp_path / "x.tar", [(f"{i}.png", noise(600)) for i in range(3)]).read_bytes())
        content[512 + 1024 : 512 + 1024 + 50] = noise(50)
        (tmp_path / "x.tar").write_bytes(content)
        with pytest.raises(DamagedArchiveError):
            opened(tmp_path / "x.tar", tmp_path)

    @pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE])
    @pytest.mark.parametrize("first", [b"", tarfile.TarInfo("a.png").tobuf()])
    def test_a_tar_of_headers_without_end_is_refused(self, kind: bytes, first: bytes, tmp_path: Path):
        info = tarfile.TarInfo("x")
        info.type, info.size = kind, 8
        header = info.tobuf(tarfile.GNU_FORMAT) + b"8 a=bcd\n".ljust(512, b"\0")
        path = tmp_path / "x.tar"
        path.write_bytes(first + header * 3000 + tarfile.TarInfo("b.png").tobuf() + bytes(1024))
        with pytest.raises(DamagedArchiveError, match="too many headers"):
            opened(path, tmp_path)

    @pytest.mark.parametrize(
        "content", [b"", b"hello", b"\x1f\x8b", b"PK\3\4" + bytes(99), gzip.compress(b"no tar", mtime=0)]
    )
    def test_what_is_no_archive_is_refused_in_one_line(self, content: bytes, tmp_path: Path):
        path = tmp_path / "x.zip"
        path.write_bytes(content)
        with pytest.raises(DataError) as caught:
            opened(path, tmp_path)
        assert "\n" not in caught.value.problem


class TestKinds:
    @pytest.mark.parametrize(
        ("mode", "name"), [("w", "a"), ("w:gz", "b.zip"), ("w:bz2", "c.dat"), ("w:xz", "d.tar.gz"), ("w:gz", "e.tgz")]
    )
    def test_a_tar_is_known_by_its_content(self, mode: str, name: str, tmp_path: Path):
        path = tar_of(tmp_path / name, [("a/1.png", b"x"), ("b/2.png", b"y")], mode)
        assert opened(path, tmp_path) == (["a/1.png", "b/2.png"], [])

    def test_a_zip_is_known_by_its_content(self, tmp_path: Path):
        path = zip_of(tmp_path / "x.tar", {"a.png": b"x"})
        path.write_bytes(b"#!/bin/sh\n" + path.read_bytes())
        assert opened(path, tmp_path)[0] == ["a.png"]

    def test_a_tar_of_the_old_kind(self, tmp_path: Path):
        path = tmp_path / "x.tar"
        header = bytearray(tarfile.TarInfo("a.png").tobuf(tarfile.USTAR_FORMAT))
        header[257:265] = bytes(8)
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
        path.write_bytes(bytes(header) + bytes(1024))
        assert opened(path, tmp_path)[0] == ["a.png"]


class TestLimits:
    @pytest.fixture
    def small(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(archives, "MAX_UNPACKED_BYTES", 10_000)

    @pytest.mark.usefixtures("small")
    def test_declared_sizes_are_checked(self, tmp_path: Path):
        in_zip = zip_of(tmp_path / "x.zip", {"a": bytes(6000), "b": bytes(6000)}, zipfile.ZIP_DEFLATED)
        in_tar = tar_of(tmp_path / "x.tar.gz", [("a", bytes(6000)), ("b", bytes(6000))], "w:gz")
        for path in (in_zip, in_tar):
            with pytest.raises(DataError, match="over the limit"):
                opened(path, tmp_path)
        assert list((tmp_path / "home" / "data").iterdir()) == []

    @pytest.mark.usefixtures("small")
    def test_what_is_written_is_counted_whatever_the_headers_say(self, tmp_path: Path):
        writer = archives._Writer(tmp_path / "out", archives._Limit("x", 100, tmp_path))
        with pytest.raises(DataError, match="over the limit"):
            writer.add("a", lambda: io.BytesIO(bytes(3 * 2**20)))
        assert list((tmp_path / "out").iterdir()) == []

    @pytest.mark.usefixtures("small")
    def test_a_zip_that_declares_less_than_it_holds_gives_no_more(self, tmp_path: Path):
        path = zip_of(tmp_path / "x.zip", {"a": bytes(5_000_000), "b": b"x"}, zipfile.ZIP_DEFLATED)
        content = bytearray(path.read_bytes())
        for mark, at in ((b"PK\1\2", 24), (b"PK\3\4", 22)):
            start = content.index(mark) + at
            content[start : start + 4] = struct.pack("<L", 10)
        path.write_bytes(content)
        assert opened(path, tmp_path) == (["b"], [("a", "truncated")])

    def test_what_grows_too_much_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(archives, "RATIO_FROM_BYTES", 100_000)
        path = zip_of(tmp_path / "x.zip", {"a": bytes(1_000_000)}, zipfile.ZIP_DEFLATED)
        with pytest.raises(DataError, match="over the limit"):
            opened(path, tmp_path)

    def test_an_entry_that_grows_too_much_in_an_archive_that_does_not_is_skipped(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(archives, "RATIO_FROM_BYTES", 100_000)
        files = {"a": bytes(1_000_000), "b": noise(50_000), "c": bytes(90_000)}
        assert opened(zip_of(tmp_path / "x.zip", files, zipfile.ZIP_DEFLATED), tmp_path) == (
            ["b", "c"],
            [("a", "too_large")],
        )

    def test_many_small_pictures_of_one_colour_pass(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(archives, "RATIO_FROM_BYTES", 100_000)
        files = {f"a/{i}.bmp": bytes(3000) for i in range(100)}
        path = zip_of(tmp_path / "x.zip", files, zipfile.ZIP_DEFLATED)
        assert opened(path, tmp_path) == (sorted(files), [])

    def test_a_bomb_of_a_quarter_gib_is_refused(self, tmp_path: Path):
        path = tmp_path / "x.zip"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("a", "w") as file:
            for _ in range(33):
                file.write(bytes(2**23))
        with pytest.raises(DataError, match="over the limit"):
            opened(path, tmp_path)

    def test_a_full_disk_is_told_before(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(archives.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 500}))
        for path in (zip_of(tmp_path / "x.zip", {"a": bytes(600)}), tar_of(tmp_path / "x.tar", [("a", bytes(600))])):
            with pytest.raises(DataError, match="left"):
                opened(path, tmp_path)

    def test_the_number_of_entries_is_limited(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(archives, "MAX_ENTRIES", 5)
        files = {f"{i}/": b"" for i in range(6)}
        for path in (zip_of(tmp_path / "x.zip", files), tar_of(tmp_path / "x.tar", list(files.items()))):
            with pytest.raises(DataError, match="over 5 entries"):
                opened(path, tmp_path)

    def test_a_header_that_would_fill_the_memory_is_refused(self, tmp_path: Path):
        info = tarfile.TarInfo("x")
        info.type, info.size = tarfile.XHDTYPE, 2**31
        path = tmp_path / "x.tar.gz"
        path.write_bytes(gzip.compress(info.tobuf() + bytes(2**20)))
        with pytest.raises(DamagedArchiveError, match="header is too large"):
            opened(path, tmp_path)


class TestOnce:
    def test_an_archive_is_unpacked_once(self, tmp_path: Path):
        path = zip_of(tmp_path / "x.zip", {"a/1.png": b"x", "../b": b"y"})
        first = unpack("x", path, tmp_path)
        (first.root / "mark").touch()
        assert unpack("x", path, tmp_path) == first
        assert first.skipped == (Skipped("../b", "unsafe_path"),)
        assert (first.root / "mark").exists()
        assert [folder.name for folder in (tmp_path / "data").iterdir()] == [first.root.parent.name]

    def test_other_bytes_under_the_same_name_are_unpacked_anew(self, tmp_path: Path):
        path = zip_of(tmp_path / "x.zip", {"a/1.png": b"x"})
        first = unpack("x", path, tmp_path)
        zip_of(path, {"a/1.png": b"z"})
        assert unpack("x", path, tmp_path).root != first.root

    def test_a_settled_archive_is_not_hashed_again(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(archives, "_SETTLED_S", -1.0)
        path = zip_of(tmp_path / "x.zip", {"a/1.png": b"x"})
        first = unpack("x", path, tmp_path)
        monkeypatch.setattr(archives.hashlib, "file_digest", None)
        assert unpack("x", path, tmp_path) == first

    def test_progress_counts_files(self, tmp_path: Path):
        seen: list[tuple[str, int, int]] = []
        path = zip_of(tmp_path / "x.zip", {"a": b"x", "b": b"y"})
        unpack("x", path, tmp_path, lambda *told: seen.append(told))
        path = tar_of(tmp_path / "x.tar", [("a", b"x"), ("b", b"y")])
        unpack("x", path, tmp_path, lambda *told: seen.append(told))
        assert seen == [("unpacking", 1, 2), ("unpacking", 2, 2), ("unpacking", 1, 0), ("unpacking", 2, 0)]
