"""Decode image files: to RGB, and masks to exact integers."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amp_core.config.errors import BadSample
from amp_core.config.files import open_file

FORMATS = ("JPEG", "PNG", "BMP", "PPM", "GIF", "TIFF", "WEBP", "AVIF", "JPEG2000")
"""What a file may be, whatever its name. Pillow knows many more, and hands PostScript to Ghostscript."""
THIN = 8
"""An image with a side of more than this many times the other one is cropped before it is scaled: with its short side
at 256 pixels, one of 1 x 12,000 would have 3 million columns."""


@contextlib.contextmanager
def _reading(name: str) -> Iterator[None]:
    """Around all that looks at a file of somebody else. Damaged ones make Pillow's readers raise nearly anything."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's, about metadata: they do not name the file
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            yield
    except Exception as error:
        reason = getattr(error, "strerror", None) or str(error).partition(" <_io")[0].rstrip(".")  # no open file
        if isinstance(error, KeyError | Image.UnidentifiedImageError):  # KeyError: a Pillow without the last formats
            reason = f"it is none of {', '.join(FORMATS)}, or its first bytes are damaged"
        reason = reason or type(error).__name__
        raise BadSample(f"cannot read the image {name}: {reason}. Replace or remove it") from error


def _open(file: Any) -> Any:
    from PIL import Image

    opened = os.fdopen(open_file(file), "rb") if isinstance(file, str) else file
    with opened, Image.open(opened, formats=FORMATS) as image:
        image.load()
        return image


def read_image(file: Any, name: str) -> Any:
    """An image of Pillow in RGB, upright, from a path or an open file.

    More than 8 bits are scaled by their range. Where it is transparent it is white, as on a page. Of an animation it is
    the first picture.

    RunError: it cannot be read; it has numbers without a known range: floats, signed ones, or ones of 32 bits; or more
    pixels than Pillow takes for sane (`Image.MAX_IMAGE_PIXELS`): one such image holds its batch up for a minute.
    """
    with _reading(name):
        stored = _open(file)
        return _upright(_rgb(stored), stored)


def read_integers(file: Any, name: str) -> NDArray[Any]:
    """The numbers of a gray or palette image, upright, [H, W]: never scaled, and of a palette the index.

    Of colours all three have to be the same. Raises RunError as `read_image`, and for anything else.
    """
    from PIL import Image

    with _reading(name):
        stored = _open(file)
        if stored.mode.startswith("I"):
            stored_as = Image.fromarray(_integers(stored)[0].astype(np.int32))
        elif stored.mode in ("1", "L", "P", "LA", "PA", "RGB", "RGBA"):
            stored_as = stored
        else:
            raise ValueError(f"it has pixels of mode {stored.mode}; expected integers")
        pixels = np.asarray(_upright(stored_as, stored))
        if pixels.ndim == 2:
            return pixels
        colours = pixels if stored.mode == "RGB" else pixels[..., :-1]
        if colours is not pixels and (pixels[..., -1] != 255).any():
            raise ValueError("it has transparent pixels; expected one integer per pixel")
        if (colours != colours[..., :1]).any():
            raise ValueError("it has colours; expected one integer per pixel, or three alike")
        return colours[..., 0]


_HOLD_IT = ("exif", "xmp", "Raw profile type exif", "XML:com.adobe.xmp")
_TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
"""By EXIF's orientation what makes an image upright, of Pillow's `Image.Transpose`."""


def _upright(image: Any, stored: Any) -> Any:
    """`image` turned as EXIF of `stored` says; as it is where there is none, or the metadata are damaged."""
    turn = None
    if stored.format == "TIFF" or not stored.info.keys().isdisjoint(_HOLD_IT):  # few images, and looking costs time
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            turn = _TURNS.get(int(stored.getexif().get(0x0112, 1)))
    return image if turn is None else image.transpose(turn)


def _rgb(image: Any) -> Any:
    """In RGB. `convert` alone clips what has more than 8 bits, and drops alpha."""
    from PIL import Image

    if image.mode.startswith("I"):
        numbers, largest = _integers(image)
        gray = _in_8_bits(largest)[numbers]
        gray[numbers == image.info.get("transparency", -1)] = 255
        return Image.fromarray(gray).convert("RGB")
    if image.mode not in ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr"):
        raise ValueError(f"it has pixels of mode {image.mode}, whose range is not known; expected 8 or 16 bits each")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        alpha = image.getchannel("A")
        if alpha.getextrema()[0] < 255:
            page = Image.new("RGB", image.size, "white")
            page.paste(image, mask=alpha)
            return page
    return image.convert("RGB")


def _integers(image: Any) -> tuple[NDArray[Any], int]:
    """(numbers [H, W] of a gray image of more than 8 bits, the largest that its file can hold)."""
    tags = getattr(image, "tag_v2", {})
    if not (image.mode.startswith("I;16") or image.format in ("PNG", "PPM")):  # of these all have 16 bits
        raise ValueError("it has signed or 32-bit numbers, whose range is not known; expected 8 or 16 bits each")
    numbers, largest = np.asarray(image), 2 ** tags.get(258, (16,))[0] - 1  # TIFF's BitsPerSample may be 12
    return (largest - numbers if tags.get(262) == 0 else numbers), largest  # WhiteIsZero, which Pillow does not invert


@functools.cache
def _in_8_bits(largest: int) -> NDArray[np.uint8]:
    """By number from 0 to `largest` the nearest of 256 levels."""
    return ((np.arange(largest + 1) * 510 + largest) // (2 * largest)).astype(np.uint8)
