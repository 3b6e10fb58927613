"""What tasks are made of: real file formats, augmentation by row alone, stretches of text."""

from __future__ import annotations

import io
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from rex_ray.core.errors import ConfigError
from workloads.learning.features import FeatureTask, patch_features
from workloads.learning.files import load_cifar10, load_fashion_mnist
from workloads.learning.images import Augmentation, Images, ImageTask
from workloads.learning.models import convolutional, count_parameters, perceptron
from workloads.learning.recipe import Recipe
from workloads.learning.tasks import SHARED, load_task
from workloads.learning.training import Training

RECIPE = Recipe(num_epochs=2, reference_batch_size=16, learning_rate=0.05, target=0.5)


def images(num_rows: int, side: int = 8, channels: int = 3) -> Images:
    rng = np.random.default_rng(num_rows)
    pixels = rng.integers(0, 256, (num_rows, side, side, channels), dtype=np.uint8)
    return Images(pixels=pixels, labels=rng.integers(0, 10, num_rows, dtype=np.uint8))


def image_task(augmentation: Augmentation, channels: int = 3) -> ImageTask:
    return ImageTask(
        name="synthetic",
        recipe=RECIPE,
        train=images(40, channels=channels),
        test=images(30, channels=channels),
        augmentation=augmentation,
        build=lambda: convolutional(channels, 8, 10),
    )


def write_jpegs(folder: Path, num_rows: int) -> np.ndarray:
    ramp = np.linspace(0, 255, 32).astype(np.uint8)
    pixels = np.stack([np.stack([np.roll(ramp, k)[:, None] + np.zeros(32, np.uint8)] * 3, -1) for k in range(num_rows)])
    files = []
    for image in pixels:
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, format="JPEG", quality=100)
        files.append(buffer.getvalue())
    np.savez(
        folder / "cifar10_jpeg.npz",
        jpeg=np.frombuffer(b"".join(files), dtype=np.uint8),
        offset=np.cumsum([0, *map(len, files)]),
        label=np.arange(num_rows, dtype=np.uint8),
        is_train=np.arange(num_rows) < num_rows - 2,
    )
    return pixels


def test_jpegs_are_decoded_once(tmp_path: Path) -> None:
    pixels = write_jpegs(tmp_path, 6)
    train, test = load_cifar10(tmp_path, tmp_path / "cache")
    assert train.labels.tolist() == [0, 1, 2, 3]
    assert test.labels.tolist() == [4, 5]
    assert np.abs(train.pixels.astype(int) - pixels[:4]).mean() < 3
    (kept,) = (tmp_path / "cache").iterdir()
    written = kept.stat().st_mtime_ns
    again, _ = load_cifar10(tmp_path, tmp_path / "cache")
    assert (again.pixels == train.pixels).all()
    assert kept.stat().st_mtime_ns == written


def test_files_that_are_missing_or_do_not_fit_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no cifar10_jpeg\.npz; give data_dir"):
        load_cifar10(tmp_path, tmp_path)
    with pytest.raises(ConfigError, match="holds no train-images-idx3-ubyte; give data_dir"):
        load_fashion_mnist(tmp_path)
    np.savez(tmp_path / "cifar10_jpeg.npz", jpeg=np.zeros(3, np.uint8))
    with pytest.raises(ConfigError, match="lacks is_train, label, offset"):
        load_cifar10(tmp_path, tmp_path)
    for content in (b"version https://git-lfs.github.com/spec/v1", b"PK\x03\x04 and no more", b""):
        (tmp_path / "cifar10_jpeg.npz").write_bytes(content)
        with pytest.raises(ConfigError, match=r"cifar10_jpeg\.npz is damaged or no npz of JPEGs .* fetch it again"):
            load_cifar10(tmp_path, tmp_path)
    write_jpegs(tmp_path, 6)
    with np.load(tmp_path / "cifar10_jpeg.npz") as stored:
        arrays = dict(stored)
    np.savez(tmp_path / "cifar10_jpeg.npz", **{**arrays, "jpeg": np.zeros_like(arrays["jpeg"])})
    with pytest.raises(ConfigError, match=r"is damaged .*cannot identify image"):
        load_cifar10(tmp_path, tmp_path)


def test_marks_may_be_numbers(tmp_path: Path) -> None:
    write_jpegs(tmp_path, 6)
    with np.load(tmp_path / "cifar10_jpeg.npz") as stored:
        arrays = dict(stored)
    np.savez(tmp_path / "cifar10_jpeg.npz", **{**arrays, "is_train": arrays["is_train"].astype(np.uint8)})
    train, test = load_cifar10(tmp_path, tmp_path / "cache")
    assert (train.labels.tolist(), test.labels.tolist()) == ([0, 1, 2, 3], [4, 5])


def test_idx_files_become_images(tmp_path: Path) -> None:
    for prefix, count in (("train", 5), ("t10k", 3)):
        for kind, values in (
            ("images-idx3-ubyte", np.full((count, 28, 28), count)),
            ("labels-idx1-ubyte", np.arange(count)),
        ):
            header = bytes([0, 0, 8, values.ndim]) + b"".join(size.to_bytes(4, "big") for size in values.shape)
            (tmp_path / f"{prefix}-{kind}").write_bytes(header + values.astype(np.uint8).tobytes())
    train, test = load_fashion_mnist(tmp_path)
    assert train.pixels.shape == (5, 28, 28, 1)
    assert test.labels.tolist() == [0, 1, 2]
    task = ImageTask(
        name="read",
        recipe=RECIPE,
        train=train,
        test=test,
        augmentation=Augmentation(max_shift=1),
        build=lambda: convolutional(1, 28, 10),
    )
    inputs, _ = task.batch(0, 0, torch.arange(5))
    assert inputs.shape == (5, 1, 28, 28)


@settings(max_examples=20, deadline=None)
@given(
    rows=st.lists(st.integers(0, 39), min_size=1, max_size=8), epoch=st.integers(0, 3), channels=st.sampled_from([1, 3])
)
def test_an_image_is_varied_by_seed_epoch_and_row_alone(rows: list[int], epoch: int, channels: int) -> None:
    task = image_task(Augmentation(flip=True, max_shift=2), channels)
    together, labels = task.batch(7, epoch, torch.tensor(rows))
    assert labels.tolist() == task.train.labels[rows].tolist()
    for image, row in zip(together, rows, strict=True):
        alone, _ = task.batch(7, epoch, torch.tensor([row]))
        assert torch.equal(image, alone[0])


def test_flips_and_shifts_move_pixels_and_repeat_the_edge() -> None:
    plain = image_task(Augmentation())
    task = image_task(Augmentation(flip=True, max_shift=2))
    originals, _ = plain.batch(0, 0, torch.arange(40))
    found, _ = task.batch(0, 0, torch.arange(40))
    flips = shifted = 0
    for image, original in zip(found, originals, strict=True):
        candidates = {}
        for flip in (False, True):
            base = original.flip(2) if flip else original
            padded = torch.nn.functional.pad(base[None], (2, 2, 2, 2), mode="replicate")[0]
            for down in range(5):
                for right in range(5):
                    candidates[flip, down, right] = padded[:, down : down + 8, right : right + 8]
        matches = [key for key, candidate in candidates.items() if torch.equal(candidate, image)]
        assert matches
        flips += matches[0][0]
        shifted += matches[0][1:] != (2, 2)
    assert 8 <= flips <= 32
    assert shifted >= 30


def test_images_are_normalised_by_the_training_set_channel_by_channel() -> None:
    inputs, _ = image_task(Augmentation()).batch(0, 0, torch.arange(40))
    assert inputs.mean(dim=(0, 2, 3)).abs().max() < 1e-5
    assert (inputs.std(dim=(0, 2, 3)) - 1).abs().max() < 1e-3


def test_features_are_of_an_image_alone_and_kept(tmp_path: Path) -> None:
    def made(rows: slice) -> np.ndarray:
        return patch_features(train, test.part(rows), num_patches=4, cache=tmp_path)[1].values

    train, test = images(40, side=16), images(30, side=16)
    whole, some = made(slice(None)), made(slice(10, 20))
    assert whole.shape == (30, 32)
    np.testing.assert_allclose(some, whole[10:20], rtol=2e-3, atol=1e-3)
    assert len(list(tmp_path.iterdir())) == 2
    for kept in tmp_path.iterdir():
        np.savez(kept.with_suffix(""), train=np.zeros((40, 32), np.float16), test=np.ones((30, 32), np.float16))
    assert (made(slice(None)) == 1).all()


def test_features_are_the_same_bytes_on_any_number_of_threads(tmp_path: Path) -> None:
    train, test = images(2000, side=16), images(30, side=16)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            made = patch_features(train, test, num_patches=16, cache=tmp_path / str(threads))
            found.append([part.values.tobytes() for part in made])
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1]


def test_a_network_on_features_learns(tmp_path: Path) -> None:
    pixels = images(200, side=16)
    bright = Images(pixels=(pixels.pixels // 2 + pixels.labels[:, None, None, None] * 12), labels=pixels.labels)
    train, test = patch_features(bright.part(slice(150)), bright.part(slice(150, 200)), num_patches=4, cache=tmp_path)
    task = FeatureTask(name="synthetic", recipe=RECIPE, train=train, test=test, build=lambda: perceptron(32, 16, 10))
    inputs, labels = task.batch(0, 0, torch.arange(150))
    assert inputs.mean(dim=0).abs().max() < 1e-3
    training = Training(task, 0)
    before = float(task.loss(training.model, inputs, labels).detach())
    while training.place.epoch < 2:
        training.step(15, 1.0)
    assert float(task.loss(training.model, inputs, labels).detach()) < before


def test_no_row_sees_another() -> None:
    """The gradient of a batch is the mean of its rows' gradients: there are no batch statistics."""
    task = image_task(Augmentation(flip=True))
    training = Training(task, 0)
    parameters = list(training.model.parameters())
    inputs, targets = task.batch(0, 0, torch.arange(8))
    whole = torch.autograd.grad(task.loss(training.model, inputs, targets), parameters)
    rows = [
        torch.autograd.grad(task.loss(training.model, inputs[k : k + 1], targets[k : k + 1]), parameters)
        for k in range(8)
    ]
    for mean, *parts in zip(whole, *rows, strict=True):
        torch.testing.assert_close(mean, torch.stack(parts).mean(dim=0), rtol=1e-4, atol=1e-6)


def test_text_is_cut_into_rows_of_one_length(tmp_path: Path) -> None:
    for part, lines in (("valid", 200), ("test", 100)):
        text = "".join(f" the cat number {k} sat on the mat . \n" for k in range(lines))
        (tmp_path / f"wikitext2_{part}.txt").write_text(text, encoding="utf-8")
    task = load_task("wikitext2", tmp_path)
    rows = torch.arange(task.dataset_size)
    words, following = task.batch(0, 0, rows)
    assert words.shape == following.shape == (task.dataset_size, 35)
    assert torch.equal(words.flatten()[1:], following.flatten()[:-1])
    training = Training(task, 0)
    before = training.evaluate()
    for _ in range(30):
        training.step(16, 1.0)
    assert training.evaluate() < before < math.inf
    with torch.no_grad():
        training.model.decoder.bias[0] = 1e6
    assert training.evaluate() == math.inf, "training that came apart is no crash"


def test_real_cifar_images_are_all_there() -> None:
    if not (SHARED / "cifar10_jpeg.npz").is_file():
        pytest.skip("the real CIFAR-10 is not at hand")
    task = load_task("cifar10_cnn")
    assert task.dataset_size == 50_000
    assert count_parameters(task.make_model()) < 50_000
    inputs, labels = task.batch(0, 0, torch.arange(0, 50_000, 500))
    assert inputs.shape == (100, 3, 32, 32)
    assert np.bincount(labels).tolist() == [10] * 10
