"""Small models without batch statistics: a row's gradient must not depend on which others share its batch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

__all__ = ["convolutional", "perceptron"]


def convolutional(num_channels: int, side: int, num_classes: int, widths: Sequence[int] = (16, 32, 64)) -> nn.Module:
    """Return three convolutions with GroupNorm, the first two of stride 2, and a linear layer; 34k parameters.

    Args:
        num_channels: of the images.
        side: rows and columns of the images, a multiple of 4.
        num_classes: scores per image.
        widths: channels of each convolution, multiples of 4.
    """
    layers: list[nn.Module] = []
    for before, width, stride in zip([num_channels, *widths], widths, (2, 2, 1), strict=False):
        layers += [
            nn.Conv2d(before, width, kernel_size=3, stride=stride, padding=1, bias=False),
            nn.GroupNorm(4, width),
            nn.ReLU(),
        ]
    pooled = (side // 4) // 2
    return nn.Sequential(*layers, nn.AvgPool2d(2), nn.Flatten(), nn.Linear(widths[-1] * pooled * pooled, num_classes))


def perceptron(num_inputs: int, num_hidden: int, num_classes: int) -> nn.Module:
    """Return one hidden layer between flattened images and scores."""
    return nn.Sequential(nn.Flatten(), nn.Linear(num_inputs, num_hidden), nn.ReLU(), nn.Linear(num_hidden, num_classes))


def count_parameters(model: nn.Module) -> int:
    """Return the number of trained scalars."""
    return sum(parameter.numel() for parameter in model.parameters())


def scores(model: nn.Module, inputs: Tensor) -> Tensor:
    """Call a model; torch types the result of a call as anything."""
    result: Tensor = model(inputs)
    return result
