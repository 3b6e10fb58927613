"""Image sets from files: CIFAR-10 as one npz of JPEGs, decoded once; Fashion-MNIST as idx files."""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rex_ray.core.errors import ConfigError
from workloads.idx import read_labelled
from workloads.learning.images import Images

__all__ = ["CACHE", "JPEGS", "load_cifar10", "load_fashion_mnist"]

CACHE = Path.home() / ".cache" / "rex_ray" / "cifar10"
JPEGS = "cifar10_jpeg.npz"


def load_cifar10(folder: Path, cache: Path = CACHE) -> tuple[Images, Images]:
    """Return training and test set.

    Args:
        folder: holds ``cifar10_jpeg.npz``: ``jpeg`` (all files end to end), ``offset`` (where each begins, and where
            the last ends), ``label``, ``is_train``.
        cache: where the decoded pixels are kept.

    Raises:
        ConfigError: the file is missing or is not what it should be.
    """
    path = folder / JPEGS
    if not path.is_file():
        raise ConfigError(f"{folder} holds no {JPEGS}; give data_dir, or train fashion_mnist instead")
    with _arrays(path) as stored:
        missing = {"jpeg", "offset", "label", "is_train"} - set(stored.files)
        if missing:
            raise ConfigError(f"{path} lacks {', '.join(sorted(missing))}; it must hold the JPEGs and their labels")
        offset, label, is_train = stored["offset"], stored["label"], stored["is_train"].astype(np.bool_)
        if not len(offset) - 1 == len(label) == len(is_train):
            raise ConfigError(f"{path}: {len(offset) - 1} images, {len(label)} labels and {len(is_train)} marks differ")
        jpeg = stored["jpeg"]
        kept = cache / f"{hashlib.sha256(jpeg.tobytes()).hexdigest()[:16]}.npy"
        pixels = np.load(kept, mmap_mode="r") if kept.is_file() else _decoded(jpeg, offset)
    if len(pixels) != len(label):
        raise ConfigError(f"{kept} holds {len(pixels)} images, not {len(label)}; remove it, and they are decoded again")
    if not kept.is_file():
        _write(kept, pixels)
    return (
        Images(pixels=pixels[is_train], labels=label[is_train]),
        Images(pixels=pixels[~is_train], labels=label[~is_train]),
    )


@contextmanager
def _arrays(path: Path) -> Iterator[Any]:
    """Open an npz; whatever damaged bytes make of its arrays and of the images in them is named."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            yield stored
    except (zipfile.BadZipFile, zlib.error, ValueError, EOFError, OSError) as error:
        first = str(error).splitlines()[0]
        raise ConfigError(f"{path} is damaged or no npz of JPEGs ({first}); fetch it again") from error


def load_fashion_mnist(folder: Path) -> tuple[Images, Images]:
    """Return training and test set from the four idx files.

    Raises:
        ConfigError: a file is missing or damaged, or images and labels do not belong together.
    """
    train, test = (read_labelled(folder, prefix) for prefix in ("train", "t10k"))
    return _grey(*train), _grey(*test)


def _grey(pixels: npt.NDArray[np.uint8], labels: npt.NDArray[np.uint8]) -> Images:
    return Images(pixels=pixels[..., None], labels=labels)


def _decoded(jpeg: npt.NDArray[np.uint8], offset: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    try:
        from PIL import Image  # noqa: PLC0415  (an optional extra, needed once)
    except ImportError as error:
        raise ConfigError("decoding JPEGs needs Pillow: pip install 'rex-ray[vision]'") from error
    images = [
        np.asarray(Image.open(io.BytesIO(jpeg[start:end].tobytes())).convert("RGB"))
        for start, end in zip(offset[:-1].tolist(), offset[1:].tolist(), strict=True)
    ]
    return np.stack(images)


def _write(path: Path, pixels: npt.NDArray[np.uint8]) -> None:
    """Write all or nothing: another process may read at this moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    with part.open("wb") as stream:
        np.save(stream, pixels)
    part.replace(path)
