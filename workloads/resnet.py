"""Residual networks by torchvision, with the normalisation of one's choice, and a small network for a CPU.

BatchNorm sees each worker's own rows, so its statistics depend on the split. GroupNorm (Wu and He 2018,
arXiv:1803.08494) sees one row at a time, and has as many parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

from torch import Tensor, nn

from rex_ray.core.errors import ConfigError

__all__ = ["Norm", "SmallColourCNN", "norm_layer", "resnet18_32px", "resnet50"]

Norm: TypeAlias = Literal["batch", "group"]

_MOST_GROUPS = 32
_FEWEST_CHANNELS = 4  # per group: one of a single channel would forget how strong the channel is


def norm_layer(norm: Norm) -> Callable[[int], nn.Module]:
    """Return what makes a normalisation of so many channels.

    Raises:
        ConfigError: another word.
    """
    if norm not in get_args(Norm):
        raise ConfigError(f"unknown norm {norm!r}; choose one of {', '.join(get_args(Norm))}")
    return nn.BatchNorm2d if norm == "batch" else _group_norm


def _group_norm(num_channels: int) -> nn.Module:
    return nn.GroupNorm(min(_MOST_GROUPS, num_channels // _FEWEST_CHANNELS), num_channels)


def resnet18_32px(num_classes: int, norm: Norm = "batch") -> nn.Module:
    """Return ResNet-18 with a stem for images of 32 pixels: 11,173,962 parameters for ten classes.

    A 3 x 3 convolution that keeps the size, no pooling after it, as every user of CIFAR trains it: the stem for 224
    pixels would leave one of 8 x 8.
    """
    model: nn.Module = _torchvision_models().resnet18(num_classes=num_classes, norm_layer=norm_layer(norm))
    stem = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
    nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")
    model.conv1, model.maxpool = stem, nn.Identity()
    return model


def resnet50(num_classes: int, norm: Norm = "batch") -> nn.Module:
    """Return ResNet-50 for images of 224 pixels: 25,557,032 parameters for a thousand classes."""
    model: nn.Module = _torchvision_models().resnet50(num_classes=num_classes, norm_layer=norm_layer(norm))
    return model


def _torchvision_models() -> Any:
    try:
        from torchvision import models  # noqa: PLC0415  (an optional extra)
    except ImportError as error:
        raise ConfigError("a ResNet needs torchvision: pip install 'rex-ray[vision]'") from error
    return models


class SmallColourCNN(nn.Module):
    """Three convolutions and one linear layer, for images of 32 pixels: 94,762 parameters for ten classes."""

    def __init__(self, num_classes: int, norm: Norm = "group") -> None:
        super().__init__()
        make_norm = norm_layer(norm)
        layers: list[nn.Module] = []
        for num_in, num_out in ((3, 32), (32, 64), (64, 128)):
            layers += [nn.Conv2d(num_in, num_out, kernel_size=3, padding=1, bias=False), make_norm(num_out)]
            layers += [nn.ReLU(), nn.MaxPool2d(2)]
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, num_classes))

    def forward(self, images: Tensor) -> Tensor:
        """Return one score per class, shape ``[rows, num_classes]``."""
        scores: Tensor = self.classifier(self.features(images))
        return scores
