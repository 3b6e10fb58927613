"""CIFAR's files as they are published, read as torchvision reads them; anything else in a pickle is refused."""

from __future__ import annotations

import io
import math
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lone_worker import train_alone

from rex_ray.core.errors import ConfigError
from workloads.cifar import MODELS, load_split, train_loop
from workloads.cifar_files import CIFAR, read_cifar
from workloads.resnet import norm_layer, resnet18_32px

FILES = {name: [file for files in source.files.values() for file in files] for name, source in CIFAR.items()}


def python2_pickle(images: np.ndarray, key: str, labels: list[int]) -> bytes:
    """A batch as Python 2 pickled it: strings are bytes, and the array is rebuilt by ``numpy.core.multiarray``."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    content = images.tobytes()
    dtype = (
        b"cnumpy\ndtype\n(" + text(b"u1") + b"K\x00K\x01tR(K\x03" + text(b"|") + b"NNN" + number(-1) * 2 + b"K\x00tb"
    )
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00t" + text(b"b") + b"tR"
    shape = b"(" + number(images.shape[0]) + number(images.shape[1]) + b"t"
    state = b"(K\x01" + shape + dtype + b"\x89T" + struct.pack("<i", len(content)) + content + b"tb"
    numbers = b"](" + b"".join(number(label) for label in labels) + b"e"
    batch_label = text(b"batch_label") + text(b"training batch 1 of 5")
    return b"\x80\x02}(" + batch_label + text(b"data") + array + state + text(key.encode()) + numbers + b"u."


def write_cifar(data_dir: Path, name: str, rows: int = 3, *, folder: str | None = None) -> dict[str, np.ndarray]:
    """Write every file of a data set with so many random rows each; return images and labels by file."""
    source = CIFAR[name]
    generator = np.random.Generator(np.random.PCG64(1))
    target = data_dir / (source.folder if folder is None else folder)
    target.mkdir(parents=True, exist_ok=True)
    written = {}
    for file in FILES[name]:
        images = generator.integers(0, 256, size=(rows, 3072), dtype=np.uint8)
        labels = generator.integers(0, source.num_classes, size=rows)
        (target / file).write_bytes(python2_pickle(images, source.label_key, labels.tolist()))
        written[file] = (images, labels)
    return written


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
@pytest.mark.parametrize("folder", [None, ""])
def test_rows_come_in_the_files_order_with_their_labels(tmp_path: Path, name: str, folder: str | None) -> None:
    written = write_cifar(tmp_path, name, folder=folder)
    for split, files in CIFAR[name].files.items():
        images, labels = read_cifar(tmp_path, name, split)
        assert images.shape == (3 * len(files), 3, 32, 32)
        assert images.dtype == np.uint8
        assert np.array_equal(images.reshape(-1, 3072), np.concatenate([written[file][0] for file in files]))
        assert np.array_equal(labels, np.concatenate([written[file][1] for file in files]))


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_torchvision_reads_the_same_images_and_labels_from_these_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    datasets = pytest.importorskip("torchvision.datasets")
    theirs_class = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[name]
    write_cifar(tmp_path, name)
    # It checks the published files' digests, and names of classes that no training needs.
    monkeypatch.setattr(theirs_class, "_check_integrity", lambda self: True)
    monkeypatch.setattr(theirs_class, "_load_meta", lambda self: None)
    for split in ("train", "test"):
        theirs = theirs_class(str(tmp_path), train=split == "train")
        images, labels = read_cifar(tmp_path, name, split)
        assert np.array_equal(images.transpose(0, 2, 3, 1), theirs.data)
        assert labels.tolist() == theirs.targets


@pytest.mark.parametrize("protocol", [2, 4])
def test_batches_pickled_by_python_3_are_read_too(tmp_path: Path, protocol: int) -> None:
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    images = np.arange(2 * 3072, dtype=np.uint8).reshape(2, 3072)
    batch = {"data": images, "fine_labels": [0, 99], "coarse_labels": [1, 2]}
    (folder / "test").write_bytes(pickle.dumps(batch, protocol=protocol))
    read, labels = read_cifar(tmp_path, "cifar100", "test")
    assert np.array_equal(read.reshape(2, -1), images)
    assert labels.tolist() == [0, 99]


class Opens:
    """Its pickle makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


def test_a_pickle_that_would_run_code_is_refused_and_runs_none(tmp_path: Path) -> None:
    (tmp_path / "test").write_bytes(pickle.dumps({"data": Opens(tmp_path / "made"), "fine_labels": []}))
    with pytest.raises(ConfigError, match="mkdir, which no array needs"):
        read_cifar(tmp_path, "cifar100", "test")
    assert not (tmp_path / "made").exists()


IMAGES = np.zeros((2, 3072), dtype=np.uint8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<html>not found</html>", "no batch of CIFAR images"),
        (python2_pickle(IMAGES, "fine_labels", [1, 2])[:-300], "no batch of CIFAR images"),
        (pickle.dumps([1, 2]), "must hold 'data' and 'fine_labels', it holds list"),
        (python2_pickle(IMAGES, "labels", [1, 2]), r"'fine_labels', it holds \['batch_label', 'data', 'labels'\]"),
        (python2_pickle(IMAGES[:, :100], "fine_labels", [1, 2]), r"not uint8 of shape \(2, 100\)"),
        (pickle.dumps({"data": "pixels", "fine_labels": []}), "must be bytes of shape .* not str"),
        (python2_pickle(IMAGES, "fine_labels", [1]), "2 images and 1 labels do not match"),
        (python2_pickle(IMAGES, "fine_labels", [1, 100]), "labels 1 to 100 exceed 0 to 99"),
        (
            pickle.dumps({"data": IMAGES, "fine_labels": ["cat", "dog"]}, protocol=2),
            "'fine_labels' are no class numbers .*download it",
        ),
    ],
)
def test_a_damaged_file_is_named_with_the_reason(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "test").write_bytes(content)
    with pytest.raises(ConfigError, match=message) as raised:
        read_cifar(tmp_path, "cifar100", "test")
    assert str(tmp_path / "test") in str(raised.value)


def test_a_missing_file_is_named_with_the_remedy(tmp_path: Path) -> None:
    write_cifar(tmp_path, "cifar10")
    (tmp_path / "cifar-10-batches-py" / "data_batch_4").unlink()
    with pytest.raises(ConfigError, match=r"data_batch_4; it must hold the unpacked python version.*every node"):
        read_cifar(tmp_path, "cifar10", "train")


def test_test_images_are_normalised_and_only_training_images_vary(tmp_path: Path) -> None:
    written = write_cifar(tmp_path, "cifar10")
    test_set, train_set = (load_split(tmp_path, "cifar10", split) for split in ("test", "train"))
    image, label = test_set[1]
    pixels, labels = written["test_batch"]
    source = CIFAR["cifar10"]
    back = image * torch.tensor(source.std).view(3, 1, 1) + torch.tensor(source.mean).view(3, 1, 1)
    assert torch.allclose(back.flatten() * 255, torch.from_numpy(pixels[1]).float(), atol=1e-3)
    assert label == labels[1]
    assert torch.equal(image, test_set[1][0])
    assert len({tuple(train_set[0][0].flatten().tolist()) for _ in range(8)}) > 1


def test_cifar10_may_be_one_file_of_jpegs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image_module = pytest.importorskip("PIL.Image")
    monkeypatch.setattr("workloads.cifar.DECODED", tmp_path / "cache")
    colours = [(250, 10, 10), (10, 250, 10), (10, 10, 250)]  # JPEG keeps a flat colour nearly as it is
    files = []
    for colour in colours:
        file = io.BytesIO()
        image_module.new("RGB", (32, 32), colour).save(file, "JPEG", quality=95)
        files.append(file.getvalue())
    np.savez(
        tmp_path / "cifar10_jpeg.npz",
        jpeg=np.frombuffer(b"".join(files), dtype=np.uint8),
        offset=np.cumsum([0, *map(len, files)]),
        label=np.array([3, 1, 4], dtype=np.uint8),
        is_train=np.array([True, False, True]),
    )
    train_set, test_set = (load_split(tmp_path, "cifar10", split) for split in ("train", "test"))
    assert [label for _, label in train_set] == [3, 4]
    assert len(list((tmp_path / "cache").iterdir())) == 1
    image, label = test_set[0]
    assert label == 1
    source = CIFAR["cifar10"]
    back = image * torch.tensor(source.std).view(3, 1, 1) + torch.tensor(source.mean).view(3, 1, 1)
    assert (back.mean(dim=(1, 2)) * 255).tolist() == pytest.approx(colours[1], abs=3)


@pytest.mark.parametrize(("num_classes", "expected"), [(10, 11_173_962), (100, 11_220_132)])
def test_resnet18_for_32_pixels_has_the_known_number_of_parameters(num_classes: int, expected: int) -> None:
    pytest.importorskip("torchvision")
    for norm in ("batch", "group"):
        model = resnet18_32px(num_classes, norm)
        assert sum(parameter.numel() for parameter in model.parameters()) == expected


@pytest.mark.parametrize("name", list(MODELS))
def test_models_score_every_class_and_under_group_norm_each_row_by_itself(name: str) -> None:
    pytest.importorskip("torchvision")
    torch.manual_seed(0)
    images = torch.randn(3, 3, 32, 32)
    by_group, by_batch = MODELS[name](7, "group"), MODELS[name](7, "batch")
    with torch.no_grad():
        together = by_group(images)
        assert together.shape == (3, 7)
        assert torch.allclose(together[:1], by_group(images[:1]), atol=1e-5)
        assert not torch.allclose(by_batch(images)[:1], by_batch(images[:2])[:1], atol=1e-5)


def test_an_unknown_norm_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown norm 'layer'; choose one of batch, group"):
        norm_layer("layer")


@pytest.mark.parametrize("amp", [False, True])
def test_the_loop_trains_the_small_network_on_one_worker_without_ray(tmp_path: Path, amp: bool) -> None:
    """Bright and dark images: after two epochs no test image is mistaken, in full and in half precision."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for file in FILES["cifar10"]:
        labels = np.arange(13) % 2
        images = np.where(labels[:, None] == 1, 230, 20) * np.ones((1, 3072))
        (folder / file).write_bytes(python2_pickle(images.astype(np.uint8), "labels", labels.tolist()))
    config = {"data_dir": str(tmp_path), "dataset": "cifar10", "model": "cnn", "norm": "batch", "amp": amp, "seed": 0}
    config |= {"num_epochs": 2, "learning_rate": 0.05, "weight_decay": 0.0, "loader_processes": 0}
    metrics = train_alone(train_loop, config, global_batch_size=16)
    assert len(metrics) == 2
    assert all(math.isfinite(each["accuracy"]) for each in metrics)
    assert metrics[-1]["accuracy"] == 1.0
