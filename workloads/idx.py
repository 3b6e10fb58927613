"""Reader for idx files, the format of MNIST and its successors, plain or gzip-compressed.

Layout (LeCun's MNIST page): two zero bytes, a type code, the number of dimensions, each dimension as a big-endian
32-bit integer, then the values in C order. Only unsigned bytes (type 0x08) are read; no image set uses another.
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rex_ray.core.errors import ConfigError

__all__ = ["find_idx", "read_idx", "read_labelled"]

_GZIP_MAGIC = b"\x1f\x8b"
_UNSIGNED_BYTE = 0x08


def find_idx(folder: Path, name: str) -> Path | None:
    """Return the file ``name`` or ``name.gz`` in ``folder`` or where torchvision would have put it, else None."""
    for parent in (folder, folder / "FashionMNIST" / "raw", folder / "raw"):
        for candidate in (parent / name, parent / f"{name}.gz"):
            if candidate.is_file():
                return candidate
    return None


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """Read one idx file of unsigned bytes.

    Compression is recognised by content, not by name: a renamed file is still the file it was.

    Args:
        path: an idx file, raw or gzip-compressed.

    Returns:
        The values, in the shape that the header states.

    Raises:
        ConfigError: the file is not idx, holds another type, or is cut short or damaged.
    """
    remedy = "; download it again or point data_dir elsewhere"
    raw = path.read_bytes()
    if raw.startswith(_GZIP_MAGIC):
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError, zlib.error) as error:
            raise ConfigError(f"{path} is a damaged gzip file ({error}){remedy}") from error
    if len(raw) < 4 or raw[:2] != b"\0\0":
        raise ConfigError(f"{path} is no idx file: it begins with {raw[:4].hex() or 'nothing'}{remedy}")
    if raw[2] != _UNSIGNED_BYTE:
        raise ConfigError(f"{path} holds values of idx type 0x{raw[2]:02x}, only unsigned bytes (0x08) are read")
    num_dimensions = raw[3]
    start = 4 + 4 * num_dimensions
    if len(raw) < start:
        raise ConfigError(f"{path} ends inside its header{remedy}")
    shape = tuple(int(n) for n in np.frombuffer(raw, dtype=">u4", count=num_dimensions, offset=4))
    expected_bytes = math.prod(shape)
    if len(raw) - start != expected_bytes:
        raise ConfigError(f"{path} states {expected_bytes} values of shape {shape}, holds {len(raw) - start}{remedy}")
    return np.frombuffer(raw, dtype=np.uint8, offset=start).reshape(shape)


def read_labelled(folder: Path, prefix: str) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Read the images of a set, shape ``[rows, height, width]``, and their labels, shape ``[rows]``.

    Args:
        folder: see ``find_idx``.
        prefix: ``"train"`` or ``"t10k"``.

    Raises:
        ConfigError: a file is missing or damaged, or images and labels do not belong together.
    """
    arrays = []
    for kind in ("images-idx3-ubyte", "labels-idx1-ubyte"):
        name = f"{prefix}-{kind}"
        path = find_idx(folder, name)
        if path is None:
            raise ConfigError(
                f"data_dir {folder} holds no {name}; give data_dir a folder with the four Fashion-MNIST idx files, "
                "plain or .gz, on every node (Debian: dataset-fashion-mnist). Without it a training loop downloads them"
            )
        arrays.append(read_idx(path))
    images, labels = arrays
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
        raise ConfigError(f"data_dir {folder}: images {images.shape} and labels {labels.shape} do not match")
    return images, labels
