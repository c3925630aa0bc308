"""Key and value cache for ragged batches and tree attention; target, causal draft and EAGLE-3 head share it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from optimized.models.ragged_rows import RowsInUse

CHUNK_ROWS = 1024  # texts are read so many rows at a time: their mask takes rows * width numbers per request


class TreeCache(Cache):
    """One committed sequence per request, followed by *pending* rows that a commit keeps or drops.

    Row ``i`` of the pending rows of request ``b`` is stored at ``lengths[b] + i``, so every request is packed from the
    left and a batch needs no padding of its own. A forward pass is three steps: ``extend`` announces the new rows and
    gives their attention mask, the model calls ``update`` once per layer, and ``commit`` or ``drop_pending`` settles
    what is pending. Several ``extend`` may come before a commit: that is how a draft tree grows level by level.

    The buffers are as long as is needed and an eighth more (64 positions at least), and grow one layer at a time: long
    texts waste little, and a row of a text that grows row by row is copied 9 times at most, on average.

    Args:
        batch: number of requests.
        device: where the lengths live; the buffers follow the model's keys and values.
    """

    def __init__(self, batch: int, device: torch.device | str = "cpu") -> None:
        super().__init__(layers=[])
        self.lengths: list[int] = [0] * batch  # committed positions of each request, on the host
        self.device_lengths = torch.zeros(batch, dtype=torch.long, device=device)  # [batch], the same on the device
        self.pending = 0
        self.contain_nan = (
            False  # whether NaN and infinities among new keys and values are stored as 0, see ``TargetModel``
        )
        self._buffers: dict[int, list[Tensor]] = {}  # layer -> [keys, values], each [batch, heads, capacity, head_dim]
        self._capacity = 0
        self._new_rows = 0
        self._start: int | None = None  # where the new rows go when all requests are equally long,
        self._positions = torch.empty(0)  # [batch, new rows], or where they go otherwise;
        self._in_use: RowsInUse | None = None  # [used] if only these of them will come

    @property
    def width(self) -> int:
        """How many positions attention looks at: the longest request, pending rows included."""
        return max(self.lengths, default=0) + self.pending

    @property
    def _batch_index(self) -> Tensor:
        return torch.arange(len(self.lengths), device=self.device_lengths.device)[:, None]

    def reserve(self, width: int) -> None:
        """Let the buffers grow in the next ``update``, if they are shorter than ``width`` positions."""
        if width > self._capacity:
            self._capacity = width + max(64, width // 8)

    def announce(self, rows: int, in_use: RowsInUse | None = None) -> None:
        """Announce new rows whose keys and values will come to ``update``; ``extend`` does so where they attend too.

        Args:
            rows: how many of each request.
            in_use: those that will be brought, packed; None: all. What is stored for the others is finite and means
                nothing.
        """
        equal = len(set(self.lengths)) == 1 and in_use is None
        self._start = self.lengths[0] + self.pending if equal else None
        self._in_use = in_use
        if self._start is None:
            first = self.device_lengths[:, None] + self.pending
            self._positions = first + torch.arange(rows, device=first.device)
        if in_use is not None:
            self._positions = self._positions[in_use.requests, in_use.columns]
        self.pending += rows
        self._new_rows = rows
        self.reserve(self.width)

    def extend(self, visible: Tensor, dtype: torch.dtype, in_use: RowsInUse | None = None) -> Tensor:
        """Announce the rows of the next forward pass.

        Args:
            visible: [batch, new, pending + new] bool; whether a new row sees each pending row, older ones first, and
                each new row. Committed positions are always seen. Every row must see itself.
            dtype: of the model's attention scores.
            in_use: as for ``announce``.

        Returns:
            [batch, 1, new, width] additive mask: 0 where visible, the most negative finite number elsewhere (a boolean
            mask would be silently wrong with eager attention, and -inf turns a row that sees nothing into NaN). Its
            attribute ``in_use`` is the argument, for ``grouped_attention``.
        """
        batch, new, columns = visible.shape
        if batch != len(self.lengths) or columns != self.pending + new:
            raise ValueError(
                f"visible has shape {tuple(visible.shape)}; [{len(self.lengths)}, new, {self.pending} + new] is needed"
            )
        self.announce(new, in_use)
        offset = self.device_lengths[:, None]
        column = torch.arange(self.width, device=offset.device) - offset  # [batch, width], 0 at the first pending row
        index = column.clamp(0, columns - 1)[:, None, :].expand(-1, new, -1)
        in_tree = visible.gather(2, index) & (column < columns)[:, None, :]
        seen = in_tree | (column < 0)[:, None, :]
        mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        mask = mask.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]
        mask.in_use = in_use  # type: ignore[attr-defined]
        return mask

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store a layer's new rows and return its first ``width`` positions.

        Args:
            key_states, value_states: [batch, heads, new, head_dim] each, or [1, heads, used, head_dim] where ``extend``
                was told which are in use.
            layer_idx: which layer.
            args, kwargs: whatever else a model gives.
        """
        announced = self._new_rows if self._in_use is None else len(self._in_use.requests)
        if key_states.shape[2] != announced:
            raise ValueError(f"extend announced {announced} rows, layer {layer_idx} brings {key_states.shape[2]}")
        buffers = self._buffers.setdefault(layer_idx, [])
        for which, states in enumerate((key_states, value_states)):
            if which == len(buffers):
                buffers.append(states.new_empty(len(self.lengths), states.shape[1], 0, states.shape[3]))
            if buffers[which].shape[2] < self._capacity:
                buffers[which] = self._grown(buffers[which])
            if self.contain_nan:
                states = states.nan_to_num(0.0, 0.0, 0.0)
            if self._start is not None:
                buffers[which][:, :, self._start : self._start + self._new_rows] = states
            elif self._in_use is not None:
                buffers[which][self._in_use.requests, :, self._positions] = states[0].transpose(0, 1)
            else:
                buffers[which][self._batch_index, :, self._positions] = states.transpose(1, 2)
        return buffers[0][:, :, : self.width], buffers[1][:, :, : self.width]

    def _grown(self, buffer: Tensor) -> Tensor:
        batch, heads, used, head_dim = buffer.shape
        # Zeros, not uninitialised memory: a masked position still multiplies its value by 0, and 0 * NaN is NaN.
        grown = buffer.new_zeros(batch, heads, self._capacity, head_dim)
        grown[:, :, :used] = buffer
        return grown

    def commit(self, counts: Tensor, rows: Tensor | None = None) -> None:
        """Keep some pending rows as the next committed positions and drop the others.

        Args:
            counts: [batch] how many rows each request keeps.
            rows: [batch, at least max(counts)] which pending rows, in order; entries from ``counts[b]`` on are ignored.
                None keeps the first ``counts[b]`` rows.

        Raises:
            ValueError: more rows than are pending.
        """
        kept = [int(count) for count in counts.tolist()]
        most = max(kept, default=0)
        if most > self.pending or min(kept, default=0) < 0 or (rows is not None and rows.shape[1] < most):
            given = "" if rows is None else f" out of {rows.shape[1]} rows"
            raise ValueError(f"cannot keep {kept}{given} of {self.pending} pending rows")
        if rows is not None and most:
            offset = self.device_lengths[:, None]
            source = offset + rows[:, :most].clamp(0, self.pending - 1)
            into = offset + torch.arange(most, device=offset.device)
            batch_index = self._batch_index
            for buffers in self._buffers.values():
                for buffer in buffers:
                    # The gather is complete before the first write, so overlapping rows are safe. Ignored entries write
                    # into rows that are dropped.
                    buffer[batch_index, :, into] = buffer[batch_index, :, source]
        self.lengths = [length + count for length, count in zip(self.lengths, kept, strict=True)]
        self.device_lengths = self.device_lengths + counts.to(self.device_lengths)
        self.pending = 0

    def drop_pending(self) -> None:
        """Forget every pending row."""
        self.pending = 0

    def select(self, keep: Tensor) -> None:
        """Keep only the requests ``keep`` ([kept] indices into the batch), in that order, pending rows included."""
        self.lengths = [self.lengths[index] for index in keep.tolist()]
        self.device_lengths = self.device_lengths[keep]
        for buffers in self._buffers.values():
            buffers[:] = [buffer[keep] for buffer in buffers]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions before the rows of the current forward pass, of the longest request."""
        return self.width - self._new_rows

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Width and offset of the mask, for models that ask."""
        return self.width, 0


def causal(batch: int, rows: int, device: torch.device | str) -> Tensor:
    """[batch, rows, rows] bool: every row sees itself and the rows before it."""
    return torch.ones(rows, rows, dtype=torch.bool, device=device).tril().expand(batch, -1, -1)


def read_texts(
    cache: TreeCache, rows: int, counts: Tensor, forward: Callable[[slice, Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """Read texts behind what is committed, ``CHUNK_ROWS`` of their rows at a time, and commit them.

    Args:
        cache: of the model that reads.
        rows: of the longest text.
        counts: [batch] rows of each; what stands behind them is padding. What is returned for none means nothing.
        forward: passes some of the rows through the model: which, their positions [batch, n], what they see [batch, n,
            n] and how many of them count [batch], at least one (where a text has ended that is padding). Returns
            [batch, 1, ...] at the last row that counts.

    Returns:
        What ``forward`` gave at every text's last row.
    """
    device, latest = cache.device_lengths.device, torch.empty(0)
    for start in range(0, rows, CHUNK_ROWS):
        part = slice(start, min(start + CHUNK_ROWS, rows))
        size = part.stop - start
        read = counts if size == rows else (counts - start).clamp(0, size)
        positions = cache.device_lengths[:, None] + torch.arange(size, device=device)
        visible = causal(len(counts), size, device)
        found = forward(part, positions, visible, read.clamp(min=1) if start else read)
        cache.commit(read)
        if start:
            goes_on = (read > 0).view(-1, *[1] * (found.ndim - 1)).to(found.device)
            found = torch.where(goes_on, found, latest)
        latest = found
    return latest
