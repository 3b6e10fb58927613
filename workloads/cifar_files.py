"""Reader for CIFAR-10 and CIFAR-100 in their "python version", the files that torchvision downloads.

Each file is a pickled dictionary (written by Python 2): ``data``, unsigned bytes of shape ``[rows, 3072]``, a row being
the red, green and blue plane of a 32 x 32 image; and ``labels`` or, for CIFAR-100, ``fine_labels``
(https://www.cs.toronto.edu/~kriz/cifar.html). A pickle can run any code when it is loaded, so only the four names that
an array is made of are known to this reader.
"""

from __future__ import annotations

import importlib
import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from rex_ray.core.errors import ConfigError

__all__ = ["CIFAR", "CifarName", "CifarSource", "read_cifar"]

CifarName: TypeAlias = Literal["cifar10", "cifar100"]

_REMEDY = "; download it again or point data_dir elsewhere"
_SHAPE = (3, 32, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class CifarSource:
    """One of the two data sets, as it is published.

    Attributes:
        folder: what the archive unpacks to.
        files: names per split, in the order of their rows.
        label_key: key of the labels.
        num_classes: labels are below it.
        mean: of the training set's pixels per channel, of 1.
        std: standard deviation likewise.
    """

    folder: str
    files: Mapping[str, tuple[str, ...]]
    label_key: str
    num_classes: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


CIFAR: Mapping[CifarName, CifarSource] = {
    "cifar10": CifarSource(
        folder="cifar-10-batches-py",
        files={"train": tuple(f"data_batch_{k}" for k in range(1, 6)), "test": ("test_batch",)},
        label_key="labels",
        num_classes=10,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
    ),
    "cifar100": CifarSource(
        folder="cifar-100-python",
        files={"train": ("train",), "test": ("test",)},
        label_key="fine_labels",
        num_classes=100,
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
    ),
}


def read_cifar(data_dir: Path, name: CifarName, split: str) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Read ``"train"`` or ``"test"``.

    Args:
        data_dir: the unpacked folder, or the one that it lies in.
        name: which data set.
        split: which part.

    Returns:
        Images, shape ``[rows, 3, 32, 32]``, and labels, shape ``[rows]``, in the files' order.

    Raises:
        ConfigError: a file is missing, damaged, or holds something else.
    """
    source = CIFAR[name]
    parts = [_read_batch(_found(data_dir, source, file), source) for file in source.files[split]]
    return np.concatenate([images for images, _ in parts]), np.concatenate([labels for _, labels in parts])


def _found(data_dir: Path, source: CifarSource, file: str) -> Path:
    for folder in (data_dir / source.folder, data_dir):
        if (folder / file).is_file():
            return folder / file
    raise ConfigError(
        f"data_dir {data_dir} holds no {source.folder}/{file}; it must hold the unpacked python version of the data "
        "set (https://www.cs.toronto.edu/~kriz/cifar.html), on every node. Without data_dir torchvision downloads it"
    )


def _read_batch(path: Path, source: CifarSource) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    try:
        # The strings of Python 2 are bytes; as latin-1 the keys are text and the arrays' content stays what it is.
        batch = _ArraysOnly(io.BytesIO(path.read_bytes()), encoding="latin1").load()
    except Exception as error:  # whatever damaged bytes make of a pickle
        raise ConfigError(f"{path} is no batch of CIFAR images ({error}){_REMEDY}") from error
    if not isinstance(batch, dict) or not {"data", source.label_key} <= batch.keys():
        keys = sorted(map(str, batch)) if isinstance(batch, dict) else type(batch).__name__
        raise ConfigError(f"{path} must hold 'data' and {source.label_key!r}, it holds {keys}{_REMEDY}")
    images = batch["data"]
    try:
        labels = np.asarray(batch[source.label_key], dtype=np.int64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{path}: {source.label_key!r} are no class numbers ({error}){_REMEDY}") from error
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.shape[1:] != (int(np.prod(_SHAPE)),):
        raise ConfigError(f"{path}: 'data' must be bytes of shape [rows, 3072], not {_kind(images)}{_REMEDY}")
    if labels.shape != images.shape[:1]:
        raise ConfigError(f"{path}: {len(images)} images and {labels.size} labels do not match{_REMEDY}")
    if labels.size and not (labels.min() >= 0 and labels.max() < source.num_classes):
        raise ConfigError(
            f"{path}: labels {labels.min()} to {labels.max()} exceed 0 to {source.num_classes - 1}{_REMEDY}"
        )
    return images.reshape(-1, *_SHAPE), labels


def _kind(value: object) -> str:
    return f"{value.dtype} of shape {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__


class _ArraysOnly(pickle.Unpickler):
    """Loads plain values and arrays, and refuses every other name."""

    _KNOWN = frozenset(
        {("multiarray", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")}
    )

    def find_class(self, module: str, name: str) -> Any:
        """Return one of the known names, wherever this release of NumPy keeps it."""
        # ``numpy.core`` to the files, ``numpy._core`` to NumPy 2.
        parent, _, last = module.rpartition(".")
        short = last if parent in ("numpy.core", "numpy._core") else module
        if (short, name) not in self._KNOWN:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no array needs")
        if short == "multiarray":
            # The only public way to the function behind a pickled array.
            return np.empty(0).__reduce__()[0]
        return getattr(importlib.import_module(short), name)
