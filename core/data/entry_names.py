"""The names of an archive's entries: what they say, whatever they were encoded in, and where they may lead."""

from __future__ import annotations

import re
import struct
import tarfile
import unicodedata
import zipfile
import zlib

_UTF8_FLAG = 0x800
_UNICODE_PATH_FIELD = 0x7075


def safe_parts(name: str) -> tuple[str, ...] | None:
    """The folders and the file of an entry's name; None where it leads out of the folder it is unpacked to."""
    name = name.replace("\\", "/")
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if name.startswith("/") or ".." in parts or "\0" in name or re.match(r"[A-Za-z]:", name):
        return None
    return parts


def zip_names(infos: list[zipfile.ZipInfo]) -> list[str]:
    """The names of a zip's entries, in NFC: UTF-8 where they say so, else what all of them or each of them may be."""
    names = [None if info.flag_bits & _UTF8_FLAG else _unicode_path(info) for info in infos]
    legacy = [
        # zipfile has decoded what bears no flag as cp437
        info.orig_filename.encode("cp437")
        for info, name in zip(infos, names, strict=True)
        if name is None and not info.flag_bits & _UTF8_FLAG
    ]
    # macOS writes UTF-8 without the flag, a Japanese Windows cp932; cp437 is what the format says
    encodings = ("utf-8",) if all(_decodes(raw, "utf-8") for raw in legacy) else ("cp932", "utf-8")
    rest = iter(legacy)
    return [
        unicodedata.normalize(
            "NFC",
            name or (info.orig_filename if info.flag_bits & _UTF8_FLAG else _decode(next(rest), encodings)),
        )
        for info, name in zip(infos, names, strict=True)
    ]


def tar_name(member: tarfile.TarInfo) -> str:
    """The name of a tar's entry, which was opened as UTF-8 with surrogateescape, in NFC."""
    raw = member.name.encode("utf-8", "surrogateescape")
    return unicodedata.normalize("NFC", _decode(raw, ("utf-8", "cp932")))


def _unicode_path(info: zipfile.ZipInfo) -> str | None:
    """The name in Info-ZIP's extra field, where it belongs to the name in the header."""
    extra = info.extra
    while len(extra) >= 4:
        kind, size = struct.unpack("<HH", extra[:4])
        field, extra = extra[4 : 4 + size], extra[4 + size :]
        if kind == _UNICODE_PATH_FIELD and len(field) > 5 and field[0] == 1:
            (checksum,) = struct.unpack("<L", field[1:5])
            if checksum == zlib.crc32(info.orig_filename.encode("cp437")) and _decodes(field[5:], "utf-8"):
                return field[5:].decode("utf-8")
    return None


def _decodes(raw: bytes, encoding: str) -> bool:
    try:
        raw.decode(encoding)
    except UnicodeDecodeError:
        return False
    return True


def _decode(raw: bytes, encodings: tuple[str, ...]) -> str:
    return raw.decode(next((encoding for encoding in encodings if _decodes(raw, encoding)), "cp437"))
