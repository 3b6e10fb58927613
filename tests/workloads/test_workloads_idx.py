"""The idx reader returns what was written, and says what is wrong with a file that it cannot read."""

from __future__ import annotations

import gzip
import math
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rex_ray.core.errors import ConfigError
from workloads.idx import find_idx, read_idx


def idx_bytes(values: np.ndarray) -> bytes:
    header = bytes([0, 0, 0x08, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    return header + values.astype(np.uint8).tobytes()


@pytest.fixture
def images() -> np.ndarray:
    return np.arange(3 * 4 * 5, dtype=np.uint8).reshape(3, 4, 5)


@given(shape=st.lists(st.integers(0, 5), min_size=1, max_size=4), compressed=st.booleans(), seed=st.integers(0, 99))
def test_reading_returns_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, shape: list[int], compressed: bool, seed: int
) -> None:
    values = np.random.Generator(np.random.PCG64(seed)).integers(0, 256, size=shape, dtype=np.uint8)
    path = tmp_path_factory.mktemp("idx") / "values"
    path.write_bytes(gzip.compress(idx_bytes(values)) if compressed else idx_bytes(values))
    read = read_idx(path)
    assert read.shape == tuple(shape)
    assert np.array_equal(read, values)


def test_compression_is_recognised_by_content_not_by_name(tmp_path: Path, images: np.ndarray) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(idx_bytes(images))
    assert np.array_equal(read_idx(path), images)


@given(cut=st.integers(1, 200))
def test_a_file_cut_anywhere_is_an_error_that_names_it(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    whole = idx_bytes(np.arange(60, dtype=np.uint8).reshape(3, 20))
    for data in (whole, gzip.compress(whole)):
        path = tmp_path_factory.mktemp("cut") / "train-images-idx3-ubyte"
        path.write_bytes(data[: max(0, len(data) - cut)])
        with pytest.raises(ConfigError, match="train-images-idx3-ubyte"):
            read_idx(path)


def test_a_damaged_gzip_file_is_named_as_such(tmp_path: Path, images: np.ndarray) -> None:
    data = bytearray(gzip.compress(idx_bytes(images)))
    data[len(data) // 2] ^= 0xFF
    path = tmp_path / "images.gz"
    path.write_bytes(bytes(data))
    with pytest.raises(ConfigError, match="damaged gzip file"):
        read_idx(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no idx file"),
        (b"<html>not found</html>", "no idx file"),
        (bytes([0, 0, 0x0D, 1]) + struct.pack(">I", 1) + b"\0\0\0\0", "idx type 0x0d"),
        (idx_bytes(np.zeros((2, 2))) + b"more", "states 4 values"),
    ],
)
def test_what_is_not_idx_is_refused_with_a_reason(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        read_idx(path)


@pytest.mark.parametrize("place", ["x", "x.gz", "FashionMNIST/raw/x", "FashionMNIST/raw/x.gz", "raw/x"])
def test_files_are_found_where_people_and_torchvision_put_them(tmp_path: Path, place: str) -> None:
    path = tmp_path / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    assert find_idx(tmp_path, "x") == path
    assert find_idx(tmp_path, "y") is None


def test_the_header_alone_states_the_shape(tmp_path: Path, images: np.ndarray) -> None:
    path = tmp_path / "images"
    path.write_bytes(idx_bytes(images))
    assert math.prod(read_idx(path).shape) == images.size
