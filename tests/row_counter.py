"""A model that counts the rows that it was trained on, for loops under Ray and under torchrun."""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.utils.data import Dataset

SECONDS_PER_ROW = {"T4": 0.002, "V100": 0.001}
ROWS, BATCH = 320, 32


class RowIds(Dataset[int]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> int:
        return index


class RowCounter(nn.Module):
    """A weight per row. Trained on the mean with learning rate B, a row's weight falls by one each time it is seen."""

    def __init__(self, seconds_per_row: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ROWS, dtype=torch.float64))
        self.seconds_per_row = seconds_per_row

    def forward(self, row_ids: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds_per_row * len(row_ids))
        return self.weight[row_ids]
