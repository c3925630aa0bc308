"""Passes over ragged batches without their padding, on CPUs.

Where requests have different numbers of rows, a batch of them is padded, and a CPU pays for padding by the row: linear
layers are most of a pass. All they need is the rows in use, one behind the other as a batch of one; only attention and
the cache have to know whose they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from optimized.ranges import arange

LEAST_SAVED = 3  # rows: packing and unpacking in every layer costs about as much as two


@dataclass(frozen=True, eq=False)
class RowsInUse:
    """Which rows of a padded batch are rows of a request.

    Attributes:
        requests, columns: [used] long, where each of them stands in the batch.
        places: [batch, rows] long, which of them stands there; of padding any.
    """

    requests: Tensor
    columns: Tensor
    places: Tensor

    @classmethod
    def of(cls, in_use: Tensor | None, device: torch.device) -> RowsInUse | None:
        """From [batch, rows] bool; None where all rows are, or leaving out the others would not pay."""
        if in_use is None or device.type != "cpu":  # elsewhere one would have to wait for the count
            return None
        used = int(in_use.sum())
        if used == 0 or in_use.numel() - used < LEAST_SAVED:
            return None
        requests, columns = in_use.nonzero(as_tuple=True)
        places = (in_use.flatten().cumsum(0) - 1).clamp(min=0).view(in_use.shape)
        return cls(requests, columns, places)


def pack(padded: Tensor, in_use: RowsInUse | None) -> Tensor:
    """[batch, rows, ...] -> [1, used, ...]; as it is where all rows are in use."""
    return padded if in_use is None else padded[in_use.requests, in_use.columns].unsqueeze(0)


def unpack(packed: Tensor, in_use: RowsInUse | None) -> Tensor:
    """[1, used, ...] -> [batch, rows, ...]; padding holds what some row does."""
    return packed if in_use is None else packed[0][in_use.places]


def first_rows(counts: Tensor, rows: int) -> Tensor:
    """[batch, rows] bool: the first ``counts[b]`` of each request."""
    return arange(rows, counts.device) < counts.unsqueeze(1)
