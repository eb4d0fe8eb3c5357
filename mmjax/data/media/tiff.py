"""Check the first page of a TIFF by what libtiff complains of, which Pillow does not raise.

Pillow brings libtiff with it, and reads through it whatever is compressed. Here the same library
reads the page once more, strip by strip or tile by tile, while its handlers of warnings and errors
are ours; they are the process's, so one thread at a time does this. Where a Pillow was built
without a libtiff of its own nothing is checked.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import threading
from functools import cache
from typing import Any

from PIL import Image

from mmjax.errors import BadMedia

MAX_PIECE = 1 << 29  # bytes of a strip or a tile
HARMLESS = (b"Unknown field with tag",)  # private tags, which are not read
_MESSAGE = 300  # characters

lock = threading.Lock()  # held while a TIFF is decoded: Pillow sets handlers too
_complaints: list[str] = []


def check_tiff(data: bytes) -> None:
    """Raise BadMedia where libtiff warns of, or cannot read, anything of the first page. The lock must be held."""
    if (library := _libtiff()) is None:
        return
    _complaints.clear()
    library.TIFFSetWarningHandler(_handler())
    # By a file, since libtiff's functions for reading from memory take callbacks for each access.
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.seek(0)  # where libtiff begins
        # m: without a memory map, whose accesses past a file's end would kill the process.
        page = library.TIFFFdOpen(os.dup(file.fileno()), b"", b"rm")
        if page:
            try:
                _read_pieces(library, page)
            finally:
                library.TIFFClose(page)
    if _complaints:
        raise BadMedia(f"a damaged TIFF: {_complaints[0]}")
    if not page:
        raise BadMedia("a corrupt TIFF: libtiff cannot open it")


def _read_pieces(library: Any, page: int) -> None:
    if library.TIFFIsTiled(page):
        count, size, read = (
            library.TIFFNumberOfTiles(page),
            library.TIFFTileSize(page),
            library.TIFFReadEncodedTile,
        )
    else:
        count, size, read = (
            library.TIFFNumberOfStrips(page),
            library.TIFFStripSize(page),
            library.TIFFReadEncodedStrip,
        )
    if not 0 < size <= MAX_PIECE:
        raise BadMedia(f"a TIFF with strips or tiles of {size:,} bytes")
    buffer = ctypes.create_string_buffer(size)
    for number in range(count):
        if read(page, number, buffer, size) < 0 or _complaints:
            _complaints.append(f"strip or tile {number} cannot be read")
            return


@cache
def _handler() -> Any:
    """Return the callback that libtiff calls with its warnings and errors."""
    # libtiff passes a format and a va_list, which on x86-64 and ARM64 arrives as a pointer: the C
    # library's own vsnprintf makes text of both.
    c = ctypes.CDLL(None)

    def complain(module: bytes, form: bytes, arguments: int) -> None:
        text = ctypes.create_string_buffer(_MESSAGE)
        c.vsnprintf(text, ctypes.c_size_t(_MESSAGE), form, ctypes.c_void_p(arguments))
        if not any(harmless in text.value for harmless in HARMLESS):
            _complaints.append(" ".join(text.value.decode(errors="replace").split()))

    return ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p)(complain)


@cache
def _libtiff() -> Any:
    """Return Pillow's libtiff, whose errors come to us from now on; None where it has none that can be called."""
    Image.init()
    try:
        # The very file that Pillow has loaded, so that the handlers are those that its reads call.
        with open("/proc/self/maps") as maps:
            path = next(line.split(maxsplit=5)[5].strip() for line in maps if "/libtiff" in line)
        library = ctypes.CDLL(path)
        sizes = ("TIFFTileSize", "TIFFStripSize")
        counts = ("TIFFNumberOfTiles", "TIFFNumberOfStrips")
        reads = ("TIFFReadEncodedTile", "TIFFReadEncodedStrip")
        # Pointers and sizes are 64 bits, of which ctypes would pass and return 32.
        library.TIFFFdOpen.restype = ctypes.c_void_p
        for name in (*sizes, *reads):
            getattr(library, name).restype = ctypes.c_ssize_t
        for name in counts:
            getattr(library, name).restype = ctypes.c_uint32
        for name in ("TIFFIsTiled", "TIFFClose", *sizes, *counts):
            getattr(library, name).argtypes = [ctypes.c_void_p]
        for name in reads:
            getattr(library, name).argtypes = [
                ctypes.c_void_p,
                ctypes.c_uint32,
                ctypes.c_void_p,
                ctypes.c_ssize_t,
            ]
        library.TIFFSetErrorHandler(_handler())
    except (OSError, StopIteration, AttributeError):
        return None
    return library
