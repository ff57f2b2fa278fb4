"""The names of an archive's entries: what they say, whatever they were encoded in, and where they may lead."""

from __future__ import annotations

import io
import re
import struct
import tarfile
import unicodedata
import zipfile
import zlib

_UTF8_FLAG = 0x800
_UNICODE_PATH_FIELD = 0x7075
_PART = re.compile(rb"(?:[\x81-\x9f\xe0-\xfc][\x40-\x7e\x80-\xfc]|[^/\\])+")
"""What separators part: the byte of a backslash may be the second one of a cp932 character, that of a slash is none."""
_NO_TEXT = re.compile("[\x80-\xa0\uf8f0-\uf8f3]")
"""What Python makes of the bytes that stand for nothing in cp932."""


def safe_parts(name: str) -> tuple[str, ...] | None:
    """The folders and the file of an entry's name; None where it leads out of the folder it is unpacked to."""
    name = name.replace("\\", "/")
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if name.startswith("/") or ".." in parts or "\0" in name or re.match(r"[A-Za-z]:", name):
        return None
    return parts


class HonestFlags(io.BufferedReader):
    """A zip's bytes, in which names that are no UTF-8 don't say they are: zipfile opens no archive with such a name.

    It reads the whole directory at once, and the 30 bytes of a local header by themselves.
    """

    def read(self, size: int | None = -1, /) -> bytes:
        packed = super().read(size)
        if not packed.startswith((b"PK\1\2", b"PK\3\4")):
            return packed
        content, at = bytearray(packed), 0
        if packed.startswith(b"PK\3\4") and len(packed) == 30:
            name = super().read(int.from_bytes(packed[26:28], "little"))
            self.seek(-len(name), io.SEEK_CUR)
            content[7] &= _kept_flags(name)
        while packed.startswith(b"PK\1\2", at) and len(packed) >= at + 46:
            name_size, extra_size, comment_size = struct.unpack_from("<HHH", packed, at + 28)
            content[at + 9] &= _kept_flags(packed[at + 46 : at + 46 + name_size])
            at += 46 + name_size + extra_size + comment_size
        return bytes(content)


def zip_names(infos: list[zipfile.ZipInfo]) -> list[str]:
    """The names of a zip's entries, in NFC: UTF-8 where they say so, else what `_legacy_names` makes of them."""
    names = [None if info.flag_bits & _UTF8_FLAG else _unicode_path(info) for info in infos]
    legacy = [
        # zipfile has decoded what bears no flag as cp437
        info.orig_filename.encode("cp437")
        for info, name in zip(infos, names, strict=True)
        if name is None and not info.flag_bits & _UTF8_FLAG
    ]
    rest = iter(_legacy_names(legacy))
    return [
        unicodedata.normalize("NFC", name or (info.orig_filename if info.flag_bits & _UTF8_FLAG else next(rest)))
        for info, name in zip(infos, names, strict=True)
    ]


def tar_name(member: tarfile.TarInfo) -> str:
    """The name of a tar's entry, which was opened as UTF-8 with surrogateescape, in NFC."""
    raw = member.name.encode("utf-8", "surrogateescape")
    return unicodedata.normalize("NFC", _by_part(raw))


def _legacy_names(raws: list[bytes]) -> list[str]:
    """Names that say nothing of their encoding; the same bytes of a folder are never decoded in two ways."""
    # macOS writes UTF-8 without the flag, a Japanese Windows cp932; cp437 is what the format says
    for encoding in ("utf-8", "cp932"):
        if all(_decodes(raw, encoding) for raw in raws):
            return [raw.decode(encoding) for raw in raws]
    foreign = [raw for raw in raws if not raw.isascii()]
    # cp437 decodes everything, so that it is believed only where it gives letters
    if not any(_decodes(raw, "utf-8") for raw in foreign) and all(map(_is_cp437_text, foreign)):
        return [raw.decode("cp437") for raw in raws]
    return [_by_part(raw) for raw in raws]


def _by_part(raw: bytes) -> str:
    """A name in which each folder, and the file, is UTF-8, else cp932, else cp437."""
    return _PART.sub(lambda found: _decode(found[0]).encode("utf-8"), raw).decode("utf-8")


def _decode(raw: bytes) -> str:
    return raw.decode(next((encoding for encoding in ("utf-8", "cp932") if _decodes(raw, encoding)), "cp437"))


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


def _kept_flags(name: bytes) -> int:
    """A mask of the flags' upper byte."""
    return 0xFF if _decodes(name, "utf-8") else 0xFF & ~(_UTF8_FLAG >> 8)


def _decodes(raw: bytes, encoding: str) -> bool:
    try:
        text = raw.decode(encoding)
    except UnicodeDecodeError:
        return False
    return encoding != "cp932" or not _NO_TEXT.search(text)


def _is_cp437_text(raw: bytes) -> bool:
    return all(char.isascii() or char.isalpha() for char in raw.decode("cp437"))
