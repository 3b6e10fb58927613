"""Image folders of small files: labels, crops, and what is said of a folder that is none."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from lone_worker import train_alone
from torch import nn

from rex_ray.core.errors import ConfigError
from workloads.imagenet import check_classes, check_layout, count_correct_top5, load_split, train_loop
from workloads.resnet import resnet50

pytest.importorskip("torchvision")
image_module = pytest.importorskip("PIL.Image")

MEAN, STD = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1), torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


def write_image(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image_module.fromarray(pixels).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes, three images each in train/ and one in val/, none of them square, of different sizes and formats."""
    for split, count in (("train", 3), ("val", 1)):
        for brightness, name in ((30, "n02"), (220, "n01")):
            for k in range(count):
                pixels = np.full((40 + 10 * k, 60, 3), brightness, dtype=np.uint8)
                write_image(tmp_path / split / name / f"{k}.{'JPEG' if k % 2 == 0 else 'png'}", pixels)
    return tmp_path


def test_labels_follow_the_folders_names_and_crops_have_the_size_asked_for(folder: Path) -> None:
    for split, count in (("train", 6), ("val", 2)):
        rows = load_split(folder, split, 32)
        assert len(rows) == count
        for image, label in rows:
            assert image.shape == (3, 32, 32)
            brightness = (image * STD + MEAN).mean() * 255
            assert float(brightness) == pytest.approx({0: 220, 1: 30}[label], abs=2)  # JPEG is not exact


def test_validation_cuts_the_middle_of_the_resized_image_and_training_cuts_anywhere(tmp_path: Path) -> None:
    """A bright square of 32 pixels in the middle of 37: validation sees nothing else, of the whole 37 by 64."""
    pixels = np.zeros((37, 64, 3), dtype=np.uint8)
    pixels[2:35, 15:49] = 255
    for split in ("train", "val"):
        write_image(tmp_path / split / "square" / "0.png", pixels)
    val_set, train_set = load_split(tmp_path, "val", 32), load_split(tmp_path, "train", 32)
    image, _ = val_set[0]
    assert float((image * STD + MEAN).min()) > 0.99
    assert torch.equal(image, val_set[0][0])
    torch.manual_seed(0)
    assert len({tuple(train_set[0][0].flatten().tolist()) for _ in range(4)}) > 1


def test_loader_processes_get_the_data_set_by_pickle(folder: Path) -> None:
    copy = pickle.loads(pickle.dumps(load_split(folder, "val", 32)))
    assert torch.equal(copy[1][0], load_split(folder, "val", 32)[1][0])


def test_a_folder_that_is_none_is_told_how_it_must_look_and_where_imagenet_comes_from(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    with pytest.raises(
        ConfigError, match=r"no folder val/; .*train/CLASS/\*\.JPEG.*no public download.*image-net\.org"
    ):
        check_layout(tmp_path)
    (tmp_path / "val").mkdir()
    with pytest.raises(ConfigError, match=r"train/: Couldn't find any class folder.*the same classes in both"):
        load_split(tmp_path, "train")
    (tmp_path / "val" / "n01").mkdir()
    with pytest.raises(ConfigError, match=r"val/: Found no valid file for the classes n01"):
        load_split(tmp_path, "val")


def test_a_class_that_one_part_lacks_is_named(folder: Path) -> None:
    write_image(folder / "train" / "n03" / "0.png", np.zeros((8, 8, 3), dtype=np.uint8))
    with pytest.raises(ConfigError, match="differ in 1 classes, the first is 'n03'"):
        check_classes(load_split(folder, "train"), load_split(folder, "val"))


def test_a_damaged_image_is_named(folder: Path) -> None:
    broken = folder / "val" / "n01" / "0.JPEG"
    broken.write_bytes(b"no image")
    with pytest.raises(ConfigError, match=f"{broken} is no readable image"):
        load_split(folder, "val", 32)[0]


def test_resnet50_has_the_known_number_of_parameters() -> None:
    for norm in ("batch", "group"):
        assert sum(parameter.numel() for parameter in resnet50(1000, norm).parameters()) == 25_557_032


class Ranked(nn.Module):
    """Class 0 scores highest, then 1, and so on."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return -torch.arange(8.0).expand(len(images), 8)


def test_the_first_five_count_beside_the_first() -> None:
    batches = [(torch.zeros(5, 3, 2, 2), torch.arange(5)), (torch.zeros(3, 3, 2, 2), torch.arange(5, 8))]
    assert count_correct_top5(Ranked(), batches) == (1, 5, 8)


@pytest.mark.parametrize("loader_processes", [0, 1])
def test_the_loop_trains_resnet50_on_one_worker_without_ray(folder: Path, loader_processes: int) -> None:
    config = {"data_dir": str(folder), "image_size": 32, "norm": "group", "num_epochs": 1, "learning_rate": 0.01}
    config |= {"amp": False, "loader_processes": loader_processes, "seed": 0}
    (metrics,) = train_alone(train_loop, config, global_batch_size=3)
    assert metrics["accuracy"] in (0.0, 0.5, 1.0)
    assert metrics["accuracy_top5"] == 1.0  # of two classes both are among the first five
