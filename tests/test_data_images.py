"""Files of every mode, orientation and damage, read or named."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from core.data.images import MAX_PIXELS, UnreadableError, decode, load_rgb, resize, show_png
from core.data.probe import NOT_A_PICTURE, probe_file, probe_files
from core.data.tree import File, read_tree
from core.errors import DataError

CASES = Path(__file__).parent / "data" / "cases"


def photo(width: int = 80, height: int = 60) -> Image.Image:
    """A picture with gradients and noise, so that a JPEG of it has something in every block."""
    y, x = np.mgrid[:height, :width]
    noise = np.random.default_rng(0).integers(0, 60, (height, width))
    planes = [x * 195 // width + noise, y * 195 // height + noise, noise * 4]
    return Image.fromarray(np.stack(planes, axis=2).astype(np.uint8))


def packed(image: Image.Image, kind: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def write(path: Path, content: bytes) -> File:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return File(str(path), path.name, len(content), 0, 0)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_is_applied(kind: str, orientation: int):
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = packed(photo(), kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {}))
    with Image.open(io.BytesIO(content)) as image:
        expected = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    got = decode(content)
    assert np.array_equal(got.pixels, expected)
    assert (got.height, got.width) == expected.shape[:2]


def gradient(dtype: type, top: float) -> np.ndarray:
    return np.tile(np.linspace(0, top, 256), (8, 1)).astype(dtype)


@pytest.mark.parametrize(
    ("content", "tolerance"),
    [
        (packed(Image.fromarray(gradient(np.uint16, 65535)), "PNG"), 1),
        (packed(Image.fromarray(gradient(np.uint16, 65535)), "TIFF"), 1),
        (packed(Image.fromarray(gradient(np.uint16, 4095)), "PNG"), 1),
        (packed(Image.fromarray(gradient(np.int32, 70_000)), "TIFF"), 1),
        (packed(Image.fromarray(gradient(np.float32, 1.0)), "TIFF"), 1),
        (packed(Image.fromarray(gradient(np.float32, 255.0)), "TIFF"), 1),
        (packed(Image.fromarray(gradient(np.float32, 9e6)), "TIFF"), 1),
        (packed(Image.fromarray(gradient(np.uint8, 255)), "PNG"), 1),
        (packed(Image.fromarray(gradient(np.uint8, 255)).convert("CMYK"), "TIFF"), 1),
        (packed(Image.fromarray(gradient(np.uint8, 255)).convert("P"), "PNG"), 1),
        (packed(Image.fromarray(gradient(np.uint8, 255)).convert("LA"), "PNG"), 1),
        (packed(Image.fromarray(gradient(np.uint8, 255)).convert("YCbCr"), "TIFF"), 3),
    ],
    ids=[
        "png16", "tiff16", "png12", "int32", "float1", "float255",
        "float_large", "grey", "cmyk", "palette", "la", "ycbcr",
    ],
)  # fmt: skip
def test_every_mode_keeps_its_gradient(content: bytes, tolerance: int):
    pixels = decode(content).pixels
    assert pixels.dtype == np.uint8
    assert pixels.shape == (8, 256, 3)
    assert np.abs(pixels[4].astype(int) - np.arange(256)[:, None]).max() <= tolerance


def test_a_float_picture_with_holes_is_read():
    values = gradient(np.float32, 1.0)
    values[0, :10] = np.nan
    values[1, :10] = np.inf
    assert decode(packed(Image.fromarray(values), "TIFF")).pixels[4, 255, 0] == 255


def test_one_bit_is_black_and_white():
    pixels = decode(packed(Image.fromarray(gradient(np.uint8, 255)).convert("1"), "PNG")).pixels
    assert set(np.unique(pixels)) == {0, 255}


def test_transparent_parts_stand_on_white():
    image = Image.new("RGBA", (4, 4), (200, 0, 0, 255))
    image.putpixel((0, 0), (0, 0, 0, 0))
    image.putpixel((1, 0), (0, 0, 0, 128))
    pixels = decode(packed(image, "PNG")).pixels
    assert pixels[0, 0].tolist() == [255, 255, 255]
    assert abs(int(pixels[0, 1, 0]) - 127) <= 1
    assert pixels[3, 3].tolist() == [200, 0, 0]
    palette = image.convert("P")
    palette.info["transparency"] = 0
    assert decode(packed(palette, "PNG", transparency=palette.getpixel((0, 0)))).pixels[0, 0].tolist() == [255] * 3


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_an_animation_gives_its_first_frame(kind: str):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ((250, 0, 0), (0, 250, 0), (0, 0, 250))]
    content = packed(
        frames[0], kind, save_all=True, append_images=frames[1:], **({"lossless": True} if kind == "WEBP" else {})
    )
    red, green, blue = decode(content).pixels[4, 4].astype(int)
    assert red > 240
    assert max(green, blue) < 10


def damaged() -> dict[str, bytes]:
    whole, half = packed(photo(), "JPEG", quality=90), 0
    half = len(whole) // 2
    progressive = packed(photo(), "JPEG", quality=90, progressive=True)
    four = packed(photo().convert("CMYK"), "JPEG")
    four = packed(photo().convert("CMYK"), "JPEG")
    png = packed(photo(), "PNG")
    return {
        "cut in the middle": whole[:half],
        "cut and closed again": whole[:half] + b"\xff\xd9",
        "rest is zeros": whole[:half] + bytes(len(whole) - half),
        "cut in the header": whole[:30],
        "progressive, cut and closed": progressive[: len(progressive) // 2] + b"\xff\xd9",
        "a hole": whole[:half] + bytes(len(whole) // 4) + whole[half + len(whole) // 4 :],
        "progressive, zeros and an end": progressive[: len(progressive) // 2] + bytes(2000) + b"\xff\xd9",
        "four colours, cut and closed": four[: len(four) // 2] + b"\xff\xd9",
        "png with a wrong checksum": png[:-16] + bytes([png[-16] ^ 0xFF]) + png[-15:],
        "png cut": png[: len(png) // 2],
        "png with a changed byte": png[: len(png) // 2] + bytes([png[len(png) // 2] ^ 0xFF]) + png[len(png) // 2 + 1 :],
        "webp cut": packed(photo(), "WEBP")[:-40],
        "gif cut": packed(photo(), "GIF")[:200],
    }


@pytest.mark.parametrize("name", damaged())
def test_damage_is_found(name: str, tmp_path: Path):
    assert probe_file(write(tmp_path / "x.jpg", damaged()[name])).why == "truncated"


def test_bytes_between_two_markers_are_no_damage(tmp_path: Path):
    whole = packed(photo(), "JPEG")
    padded = whole[:-2] + b"\0" * 32 + whole[-2:]
    assert probe_file(write(tmp_path / "x.jpg", padded)).why == ""
    assert np.array_equal(decode(padded).pixels, decode(whole).pixels)


def test_an_odd_colour_profile_is_no_damage(tmp_path: Path):
    whole = packed(photo(), "JPEG")
    profile = b"ICC_PROFILE\0\7\2" + bytes(600)
    odd = whole[:2] + b"\xff\xe2" + (len(profile) + 2).to_bytes(2, "big") + profile + whole[2:]
    assert probe_file(write(tmp_path / "x.jpg", odd)).why == ""
    assert np.array_equal(decode(odd).pixels, decode(whole).pixels)


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.JPG", packed(photo(), "JPEG"), ""),
        ("a.jpeg", packed(photo(), "PNG"), ""),
        ("no_extension", packed(photo(), "JPEG"), ""),
        ("a.jpg_large", packed(photo(), "JPEG"), ""),
        ("a.qoi", packed(photo(), "QOI"), ""),
        ("a.tga", packed(photo(), "TGA"), ""),
        ("a.jp2", packed(photo(), "JPEG2000"), ""),
        ("a.avif", packed(photo(), "AVIF"), ""),
        ("a.png", b"<html>not found</html>", "not_an_image"),
        ("a.png", b"", "zero_bytes"),
        ("a.txt", b"", NOT_A_PICTURE),
        ("a.txt", b"some words", NOT_A_PICTURE),
        ("a.svg", b"<svg xmlns='http://www.w3.org/2000/svg'/>", "unsupported_format"),
        ("a.heic", b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(64), "unsupported_format"),
        ("a.jpg", b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(64), "unsupported_format"),
        ("a.nef", packed(photo(), "TIFF"), "unsupported_format"),
        ("a.3fr", packed(photo(), "TIFF"), "unsupported_format"),
        ("a.cr2", b"II*\0\x10\0\0\0CR\2\0" + bytes(64), "unsupported_format"),
        ("a.nef", packed(photo(), "JPEG"), ""),
        ("a.dcm", bytes(128) + b"DICM", "unsupported_format"),
        ("a.dng", packed(photo(), "TIFF"), "unsupported_format"),
        ("a.eps", packed(photo(), "EPS"), "unsupported_format"),
        ("a.mp4", b"\0\0\0\x18ftypisom\0\0\0\0" + bytes(64), NOT_A_PICTURE),
        ("a.csv", b"\n\5\1\1" + bytes(200), NOT_A_PICTURE),
    ],
)
def test_the_bytes_decide_what_a_file_is(name: str, content: bytes, why: str, tmp_path: Path):
    assert probe_file(write(tmp_path / name, content)).why == why


def test_whole_files_of_a_kind_that_cannot_be_read_are_not_called_damaged(tmp_path: Path):
    deep = bytearray(packed(photo(), "JPEG"))
    deep[deep.index(b"\xff\xc0") + 4] = 12
    assert probe_file(write(tmp_path / "deep.jpg", bytes(deep))).why == "unsupported_format"
    tiff = packed(Image.fromarray(gradient(np.float32, 1.0)), "TIFF")
    # BitsPerSample, a short, once: 32 becomes 24
    bits = (258).to_bytes(2, "little") + b"\3\0\1\0\0\0"
    at = tiff.index(bits) + len(bits)
    assert tiff[at] == 32
    odd = tiff[:at] + bytes([24]) + tiff[at + 1 :]
    assert probe_file(write(tmp_path / "odd.tif", odd)).why == "unsupported_format"


def test_a_transparent_deep_grey_stands_on_white():
    grey = gradient(np.uint16, 65535)
    pixels = decode(packed(Image.fromarray(grey), "PNG", transparency=int(grey[0, 0]))).pixels
    assert pixels[0, 0].tolist() == [255, 255, 255]
    assert pixels[0, 9, 0] == 9


def test_extreme_floats_keep_their_gradient():
    values = np.tile(np.linspace(-3e38, 3e38, 256, dtype=np.float64), (8, 1)).astype(np.float32)
    pixels = decode(packed(Image.fromarray(values), "TIFF")).pixels
    assert np.abs(pixels[4, :, 0].astype(int) - np.arange(256)).max() <= 1


def test_large_pictures_of_other_formats_may_be_made_smaller_too():
    small = decode(packed(photo(1600, 1200), "PNG"), at_least=100)
    assert (small.width, small.height) == (1600, 1200)
    assert small.pixels.shape == (400, 534, 3)
    assert decode(packed(photo(400, 300), "PNG"), at_least=100).pixels.shape == (300, 400, 3)


def test_a_file_that_the_system_refuses_is_named(tmp_path: Path):
    assert probe_file(File(str(tmp_path / "gone.png"), "gone.png", 10, 0, 0)).why == "unreadable"


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_picture_of_too_many_pixels_is_left_out_unread(tmp_path: Path):
    side = int(MAX_PIXELS**0.5) + 1
    content = packed(Image.new("1", (side, side)), "PNG")
    with pytest.raises(UnreadableError) as caught:
        decode(content)
    assert caught.value.why == "too_large"


def test_large_jpegs_may_be_decoded_small_and_tell_their_own_size():
    content = packed(photo(1600, 1200), "JPEG")
    small = decode(content, at_least=100)
    assert (small.width, small.height) == (1600, 1200)
    assert small.pixels.shape == (300, 400, 3)
    assert decode(content, at_least=400).pixels.shape == (1200, 1600, 3)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_resizing_agrees_with_pillow(interpolation: str):
    image = photo(500, 375)
    ours = resize(np.asarray(image), 256, 341, interpolation).astype(int)
    theirs = np.asarray(image.resize((341, 256), getattr(Image.Resampling, interpolation.upper()))).astype(int)
    assert np.abs(ours - theirs).max() <= 1


def test_what_was_found_is_remembered_until_the_file_changes(tmp_path: Path):
    root = tmp_path / "d"
    write(root / "a" / "1.png", packed(photo(), "PNG"))
    write(root / "a" / "2.png", packed(photo(), "PNG")[:50])

    def probes(**options: object) -> tuple[list[str], list[str]]:
        read: list[str] = []
        found = probe_files(
            root,
            list(read_tree(root).top.all_files()),
            tmp_path / "home",
            sink=lambda digest, _: read.append(digest),
            **options,
        )
        return [probe.why for probe in found], read

    whys, read = probes()
    assert (whys, len(read)) == (["", "truncated"], 1)
    assert probes() == (["", "truncated"], [])
    assert len(probes(anew=True)[1]) == 1
    write(root / "a" / "2.png", packed(photo(), "PNG"))
    whys, read = probes()
    assert (whys, len(read)) == (["", ""], 1)


def test_without_a_home_that_can_be_written_nothing_is_remembered_and_all_is_read(tmp_path: Path):
    write(tmp_path / "d" / "a" / "1.png", packed(photo(), "PNG"))
    (tmp_path / "home").write_text("a file where the folder should be")
    files = list(read_tree(tmp_path / "d").top.all_files())
    assert [probe.why for probe in probe_files(tmp_path / "d", files, tmp_path / "home")] == [""]


def test_progress_counts_what_is_remembered(tmp_path: Path):
    for number in range(3):
        write(tmp_path / "d" / "a" / f"{number}.png", packed(photo(), "PNG"))
    files, told = list(read_tree(tmp_path / "d").top.all_files()), []
    probe_files(tmp_path / "d", files, tmp_path, progress=lambda *step: told.append(step))
    assert told == [("reading images", 0, 3), ("reading images", 3, 3)]
    told.clear()
    probe_files(tmp_path / "d", files, tmp_path, progress=lambda *step: told.append(step))
    assert told == [("reading images", 3, 3)]


def test_show_writes_what_the_loader_sees(tmp_path: Path):
    root = CASES / "exif_rotation" / "data"
    show_png(root, "sky_up/phone6.jpg", tmp_path / "out.png")
    assert np.array_equal(np.asarray(Image.open(tmp_path / "out.png")), load_rgb(root / "sky_up" / "phone6.jpg"))
    with pytest.raises(DataError, match="has no file"):
        show_png(root, "../expect.json", tmp_path / "out.png")
