"""What image files become: every mode against values computed in float64, and damaged or absurd files named."""

from __future__ import annotations

import io
import random
import re
import resource
import struct
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from damaged import CHANGES
from PIL import Image
from running import Forked

from amp_core.config.errors import RunError
from amp_core.data.decode import FORMATS, THIN, read_image, read_integers
from amp_core.data.images import ImageFiles
from amp_core.data.masks import MaskFiles
from amp_core.data.prepare import ALIGNED

ROOT = Path(__file__).resolve().parents[2]
RNG = np.random.default_rng(0)
HEIGHT, WIDTH = 16, 24
BYTES = RNG.integers(0, 256, (HEIGHT, WIDTH, 4), dtype=np.uint8)
ALPHA = np.where(BYTES[..., 3] < 64, 0, BYTES[..., 3]).astype(np.uint8)
PALETTE = RNG.integers(0, 256, (256, 3), dtype=np.uint8)
WORDS = RNG.integers(0, 2**16, (HEIGHT, WIDTH, 4), dtype=np.uint16)
Pixels = Any


# --- files, written by hand where Pillow does not write them -------------------------------------------------------------


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    image.save(file := io.BytesIO(), kind, **options)
    return file.getvalue()


def of_mode(pixels: Pixels, mode: str, palette: Pixels | None = None) -> Image.Image:
    image = Image.frombytes(mode, pixels.shape[1::-1], np.ascontiguousarray(pixels).tobytes())
    if palette is not None:
        image.putpalette(palette.tobytes())
    return image


def png(words: Pixels, colour: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG of 16 bits; `colour` is its type: 0 gray, 2 RGB, 4 gray with alpha, 6 RGBA."""
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in words)
    header = struct.pack(">IIBBBBB", words.shape[1], words.shape[0], 16, colour, 0, 0, 0)
    parts = [(b"IHDR", header), *chunks, (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )


def tiff(data: bytes, bits: int, photometric: int) -> bytes:
    """A gray TIFF in one strip, little-endian; photometric 0: white is 0."""
    tags = {256: WIDTH, 257: HEIGHT, 258: bits, 259: 1, 262: photometric, 273: 8, 277: 1, 278: HEIGHT, 279: len(data)}
    entries = b"".join(struct.pack("<HHII", tag, 4 if value > 65535 else 3, 1, value) for tag, value in tags.items())
    return struct.pack("<2sHI", b"II", 42, 8 + len(data)) + data + struct.pack("<H", len(tags)) + entries + bytes(4)


def in_12_bits(numbers: Pixels) -> bytes:
    """Two numbers in three bytes, the first one in the high bits."""
    a, b = numbers.reshape(-1, 2).astype(np.uint32).T
    return np.stack([a >> 4, (a & 15) << 4 | b >> 8, b & 255], axis=1).astype(np.uint8).tobytes()


# --- the modes ----------------------------------------------------------------------------------------------------------


def on_white(colours: Pixels, alpha: Pixels) -> Pixels:
    share = np.asarray(alpha, dtype=np.float64)[..., None] / 255
    return colours * share + 255 * (1 - share)


def gray(values: Pixels) -> Pixels:
    return np.repeat(np.asarray(values, dtype=np.float64)[..., None], 3, axis=-1)


def from_inks(inks: Pixels) -> Pixels:
    light = 1 - np.asarray(inks, dtype=np.float64) / 255
    return 255 * light[..., :3] * light[..., 3:]


def from_ycc(ycc: Pixels) -> Pixels:
    """JPEG's equations."""
    y, blue, red = np.moveaxis(np.asarray(ycc, dtype=np.float64), -1, 0) - np.array([0, 128, 128])[:, None, None]
    colours = [y + 1.402 * red, y - 0.344136 * blue - 0.714136 * red, y + 1.772 * blue]
    return np.stack(colours, axis=-1).clip(0, 255)


L, RGB, INDEX = BYTES[..., 0], BYTES[..., :3], BYTES[..., 0] % 8
BLOCKS = np.kron(BYTES[:2, :3], np.ones((8, 8, 1), dtype=np.uint8))  # JPEG keeps the means of 8 x 8 pixels
FRAMES = [Image.fromarray(PALETTE[INDEX]), Image.fromarray(255 - PALETTE[INDEX])]
SEVERAL: dict[str, Any] = {"save_all": True, "append_images": FRAMES[1:], "duration": 100}
PART = RNG.integers(0, 256, 8, dtype=np.uint8)  # the alpha of eight colours of a palette
W, W12 = WORDS[..., 0], WORDS[..., 0] >> 4
KEYED = np.where(BYTES[..., 3:] < 128, 7, BYTES[..., :3]).astype(np.uint8)

# Half a level is rounding. Pillow keeps the high byte of 16-bit colours: less than 1 off. Its fixed-point YCbCr rounds
# each product and the sum: 1.5 at most. JPEG at quality 100 keeps means to 1/2 and rounds: an ink is off by 1, a
# product of two inks by 2.
MODES: dict[str, tuple[bytes, Pixels, float]] = {
    "1": (saved(Image.fromarray(L > 99), "PNG"), gray(255 * (L > 99)), 0),
    "L": (saved(of_mode(L, "L"), "PNG"), gray(L), 0),
    "L, one value clear": (saved(of_mode(KEYED[..., 0], "L"), "PNG", transparency=7), on_white(gray(KEYED[..., 0]), 255.0 * (KEYED[..., 0] != 7)), 0),
    "LA": (saved(of_mode(BYTES[..., [0, 3]], "LA"), "PNG"), on_white(gray(L), BYTES[..., 3]), 0.5),
    "P": (saved(of_mode(L, "P", PALETTE), "PNG"), PALETTE[L], 0),
    "P, one colour clear": (saved(of_mode(INDEX, "P", PALETTE[:8]), "PNG", transparency=3), on_white(PALETTE[INDEX], 255.0 * (INDEX != 3)), 0),
    "P, colours half clear": (saved(of_mode(INDEX, "P", PALETTE[:8]), "PNG", transparency=PART.tobytes()), on_white(PALETTE[INDEX], PART[INDEX]), 0.5),
    "PA": (saved(of_mode(np.stack([L, ALPHA], axis=-1), "PA", PALETTE), "TIFF"), on_white(PALETTE[L], ALPHA), 0.5),
    "RGB": (saved(of_mode(RGB, "RGB"), "BMP"), RGB, 0),
    "RGB, one colour clear": (saved(of_mode(KEYED, "RGB"), "PNG", transparency=(7, 7, 7)), on_white(KEYED, 255.0 * (KEYED != 7).any(-1)), 0),
    "RGBA": (saved(of_mode(np.dstack([RGB, ALPHA]), "RGBA"), "PNG"), on_white(RGB, ALPHA), 0.5),
    "RGBA, opaque": (saved(of_mode(np.dstack([RGB, ALPHA | 255]), "RGBA"), "PNG"), RGB, 0),
    "RGBA, WebP": (saved(of_mode(np.dstack([RGB, ALPHA]), "RGBA"), "WEBP", lossless=True, exact=True), on_white(RGB, ALPHA), 0.5),
    "CMYK, TIFF": (saved(of_mode(BYTES, "CMYK"), "TIFF"), from_inks(BYTES), 1),
    "CMYK, Adobe's inverted JPEG": (saved(of_mode(BLOCKS, "CMYK"), "JPEG", quality=100, subsampling=0), from_inks(BLOCKS), 3),
    "YCbCr": (saved(of_mode(RGB, "YCbCr"), "TIFF"), from_ycc(RGB), 1.5),
    "I;16, PNG": (png(W[..., None], 0), gray(W / 257), 0.5),
    "I;16, PNG, one value clear": (png(W[..., None], 0, (b"tRNS", W[2, 3].tobytes()[::-1])), gray(np.where(W[2, 3] == W, 255, W / 257)), 0.5),
    "I;16, TIFF": (tiff(W.tobytes(), 16, 1), gray(W / 257), 0.5),
    "I;16, TIFF, white is 0": (tiff(W.tobytes(), 16, 0), gray(255 - W / 257), 0.5),
    "I;16B, TIFF": (saved(Image.frombytes("I;16B", (WIDTH, HEIGHT), W.astype(">u2").tobytes()), "TIFF"), gray(W / 257), 0.5),
    "I;16, TIFF of 12 bits": (tiff(in_12_bits(W12), 12, 1), gray(W12 / 4095 * 255), 0.5),
    "I, PGM": (b"P5 %d %d 65535\n" % (WIDTH, HEIGHT) + W.astype(">u2").tobytes(), gray(W / 257), 0.5),
    "I, PGM to 1000": (b"P5 %d %d 1000\n" % (WIDTH, HEIGHT) + (W % 1001).astype(">u2").tobytes(), gray(W % 1001 / 1000 * 255), 0.51),  # two roundings
    "RGB of 16 bits": (png(WORDS[..., :3], 2), WORDS[..., :3] / 257, 1),
    "LA of 16 bits, opaque": (png(np.dstack([W, W | 65535]), 4), gray(W / 257), 1),
    "RGBA of 16 bits, opaque": (png(np.dstack([WORDS[..., :3], W | 65535]), 6), WORDS[..., :3] / 257, 1),
    "GIF of two": (saved(FRAMES[0].quantize(8, method=Image.Quantize.FASTOCTREE), "GIF", save_all=True, append_images=[FRAMES[1]]), None, 0),
    "PNG of two": (saved(FRAMES[0], "PNG", **SEVERAL), PALETTE[INDEX], 0),
    "WebP of two": (saved(FRAMES[0], "WEBP", lossless=True, **SEVERAL), PALETTE[INDEX], 0),
    "TIFF of two": (saved(FRAMES[0], "TIFF", **SEVERAL), PALETTE[INDEX], 0),
}  # fmt: skip


@pytest.mark.parametrize("name", MODES)
def test_every_mode_becomes_the_rgb_that_its_numbers_mean(name: str) -> None:
    content, expected, bound = MODES[name]
    found = read_image(io.BytesIO(content), name)
    if expected is None:  # its palette is Pillow's
        expected = np.asarray(FRAMES[0].quantize(8, method=Image.Quantize.FASTOCTREE).convert("RGB"))
    assert found.mode == "RGB" and np.abs(np.asarray(found, dtype=np.float64) - expected).max() <= bound
    assert np.std(expected) > 30  # not all white or black


@pytest.mark.parametrize("content, reason", [
    (saved(Image.fromarray(L.astype(np.float32)), "TIFF"), "mode F, whose range is not known"),
    (saved(Image.fromarray(L.astype(np.int32)), "TIFF"), "signed or 32-bit numbers"),
    (saved(of_mode(RGB, "LAB"), "TIFF"), "mode LAB"),
    (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n", "none of JPEG, PNG"),
    (saved(Image.new("L", (9, 9)), "PCX"), "none of JPEG, PNG"),
    (b"", "none of JPEG, PNG"),
    (saved(Image.new("1", (13_000, 13_000)), "PNG"), "169000000 pixels"),
    (saved(Image.fromarray(RGB), "PNG")[:-500], "truncated"),
])  # fmt: skip
def test_what_cannot_be_read_is_named_with_its_reason(content: bytes, reason: str) -> None:
    for read in (read_image, read_integers):
        if read is read_integers and "range" in reason:
            reason = "mode F; expected integers"
        with pytest.raises(RunError, match=rf"^cannot read the image a\.png: .*{reason}.* Replace or remove it$"):
            read(io.BytesIO(content), "a.png")


TURNED: dict[int, Callable[[Pixels], Pixels]] = {
    # EXIF: what the first row and the first column of the file are in the upright image.
    1: lambda x: x,  # top, left
    2: lambda x: x[:, ::-1],  # top, right
    3: lambda x: x[::-1, ::-1],  # bottom, right
    4: lambda x: x[::-1],  # bottom, left
    5: lambda x: x.swapaxes(0, 1),  # left, top
    6: lambda x: x.swapaxes(0, 1)[:, ::-1],  # right, top
    7: lambda x: x.swapaxes(0, 1)[::-1, ::-1],  # right, bottom
    8: lambda x: x.swapaxes(0, 1)[::-1],  # left, bottom
}


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP", "JPEG"])
@pytest.mark.parametrize("orientation", TURNED)
def test_exif_orientations_are_applied(orientation: int, kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"WEBP": {"lossless": True}, "JPEG": {"quality": 100, "subsampling": 0}}.get(kind, {})
    content = saved(of_mode(BLOCKS[..., :3], "RGB"), kind, exif=exif, **options)
    expected = TURNED[orientation](BLOCKS[..., :3])
    found = np.asarray(read_image(io.BytesIO(content), kind), dtype=np.int64)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= (4 if kind == "JPEG" else 0)  # 3 channels off by 1, times 1.772 at most
    if kind == "PNG":
        content = saved(of_mode(L, "L"), kind, exif=exif)
        assert np.array_equal(read_integers(io.BytesIO(content), kind), TURNED[orientation](L))


@pytest.mark.parametrize(
    "exif", [b"Exif\0\0II*\0\xff\xff\xff\x7f", b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x63\0\0"]
)
def test_a_damaged_orientation_is_none(exif: bytes) -> None:
    assert np.array_equal(read_image(io.BytesIO(saved(Image.fromarray(RGB), "PNG", exif=exif)), ""), RGB)


@pytest.mark.parametrize("content, expected", [
    (png(W[..., None], 0), W),
    (tiff(in_12_bits(W12), 12, 1), W12),
    (saved(Image.fromarray(L > 99), "PNG"), L > 99),
    (saved(of_mode(L, "P", PALETTE), "PNG"), L),
    (saved(of_mode(INDEX, "P", PALETTE[:8]), "PNG", transparency=3), INDEX),
    (saved(of_mode(np.dstack([L, L | 255]), "LA"), "PNG"), L),
    (saved(of_mode(np.dstack([L, L, L]), "RGB"), "PNG"), L),
    (saved(of_mode(np.dstack([L, L, L, L | 255]), "RGBA"), "PNG"), L),
    (saved(of_mode(RGB, "RGB"), "PNG"), "colours"),
    (saved(of_mode(np.dstack([L, ALPHA]), "LA"), "PNG"), "transparent"),
    (saved(of_mode(BYTES, "CMYK"), "TIFF"), "mode CMYK"),
])  # fmt: skip
def test_the_integers_of_a_mask_are_exact(content: bytes, expected: Any) -> None:
    if isinstance(expected, str):
        with pytest.raises(RunError, match=expected):
            read_integers(io.BytesIO(content), "mask.png")
    else:
        assert np.array_equal(read_integers(io.BytesIO(content), "mask.png"), expected)


@pytest.mark.parametrize("value", [2, 256, 257, 300, 511, 65535])
def test_a_mask_of_16_bits_is_looked_up_exactly(value: int, tmp_path: Path) -> None:
    numbers = np.full((HEIGHT, WIDTH), 255, dtype=np.uint16)
    (tmp_path / "image.png").write_bytes(png(np.dstack([numbers] * 3), 2))
    (tmp_path / "mask.png").write_bytes(png(numbers[..., None], 0))
    files = MaskFiles([(str(tmp_path / "image.png"), str(tmp_path / "mask.png"))], WIDTH, False, 0)
    assert files.__getitems__([(0, 0)])[1].eq(1).sum() == HEIGHT * WIDTH
    numbers[3, 4] = value
    (tmp_path / "mask.png").write_bytes(png(numbers[..., None], 0))
    with pytest.raises(RunError, match=f"has a pixel of {value}; expected 0, 255"):
        files.__getitems__([(0, 0)])


def test_every_image_is_opened_with_the_list_of_formats() -> None:
    """Else Pillow hands PostScript, whatever the name of its file, to Ghostscript."""
    roots = [
        ROOT / name for name in ("amp_core", "amp_tools", "amp_conformance", "recipes", "scripts", "hydra_plugins")
    ]
    calls = [
        call
        for root in roots
        for path in root.rglob("*.py")
        for call in re.findall(r"Image\.open\(.*", path.read_text())
    ]
    assert len(calls) > 1 and all("formats=" in call for call in calls), calls
    assert not {"EPS", "PSD", "WMF", "HDF5", "GRIB", "FITS"} & set(FORMATS)


def test_nothing_but_a_run_error_comes_out_of_damaged_files() -> None:
    """Bytes flipped, cut, moved, zeroed: each file is read or named."""
    rng, outcomes = random.Random(0), {True: 0, False: 0}
    small = [content for content, *_ in MODES.values()]
    small += [saved(FRAMES[0], kind) for kind in ("AVIF", "JPEG2000", "JPEG", "WEBP") if kind in Image.SAVE]
    for content in small:
        for _ in range(30):
            damaged = bytearray(content)
            rng.choice(CHANGES)(damaged, rng)
            for read in (read_image, read_integers):
                try:
                    read(io.BytesIO(bytes(damaged)), "x")
                except RunError:
                    outcomes[False] += 1
                else:
                    outcomes[True] += 1
    assert min(outcomes.values()) > 300, outcomes


# --- thin pictures ------------------------------------------------------------------------------------------------------

SHAPES = [(1, 12_000), (12_000, 1), (2, 4_000_000), (4_000_000, 2)]


@pytest.mark.parametrize(
    "shape", [(60, 60 * THIN), (60 * THIN, 60), (60, 60 * THIN + 1), (60 * THIN + 1, 60), (9, 700)]
)
def test_the_centre_of_a_thin_picture_is_that_of_the_whole_one(shape: tuple[int, int], tmp_path: Path) -> None:
    """Scaled whole, then cropped; the same bits up to THIN, beyond it the weights are rounded elsewhere."""
    y, x = np.mgrid[: shape[0], : shape[1]]
    pixels = np.stack([127 + 120 * np.sin(x / (5 + c) + y / 9) for c in range(3)], axis=-1).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    files = ImageFiles([str(tmp_path / "a.png")], np.zeros(1), 1, 28, False, 0)
    found = files._read((str(tmp_path / "a.png"), "a"), np.zeros(41)).astype(np.int64)
    height, width = (32 if side == min(shape) else int(side * (32 / min(shape))) for side in shape)
    whole = Image.fromarray(pixels).resize((width, height), Image.Resampling.BILINEAR)
    left, top = round((width - 28) / 2), round((height - 28) / 2)
    expected = np.asarray(whole.crop((left, top, left + 28, top + 28)), dtype=np.int64)
    assert np.abs(found - expected).max() <= (max(shape) > THIN * min(shape))


def read_thin_pictures() -> int:
    """Print by how many bytes the peak of this process rises when all readers read them."""

    def read(path: str) -> None:
        for trains in (True, False):
            ImageFiles([path], np.zeros(1), 1, 224, trains, 0).__getitems__([(0, 0)])
            MaskFiles([(path, path)], 224, trains, 0).__getitems__([(0, 0)])
            ImageFiles([path], np.zeros(1), 1, 224, trains, 0, prepared=ALIGNED).__getitems__([(0, 0)])

    read("warm.png")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for height, _ in SHAPES:
        read(f"{height}.png")
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * (1 if sys.platform == "darwin" else 1024))
    return 0


def test_thin_pictures_take_the_memory_of_their_pixels(own_folder: Path) -> None:
    for height, width in SHAPES:
        Image.new("L", (width, height)).save(f"{height}.png")
    Image.new("L", (250, 250)).save("warm.png")
    peak = int(Forked(read_thin_pictures).communicate(280)[0].splitlines()[-1])
    # Per pixel 1 byte as stored, 4 of RGB, 4 of RGB squeezed on one side, 7 of a mask in 8, 16 and 32 bits; per row two
    # pointers of Pillow's each time; what is scaled: THIN times 256 x 256 pixels of 4 bytes, rows and columns; and 16
    # MiB for what else is allocated.
    assert peak <= max((16 * width + 3 * 16) * height for height, width in SHAPES) + 2 * THIN * 256**2 * 4 + 2**24
