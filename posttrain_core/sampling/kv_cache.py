"""A key/value cache for batched decoding: prompts stored once computed, rows that leave without moving the rest.

B rows, H heads, D head size, L cached positions. transformers' DynamicCache copies the whole cache at every token
and at every compaction; this one writes into spare room, and compaction moves only the rows that fill holes.
"""

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

SPARE_POSITIONS = 64


class RowLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Keys and values [B, H, capacity, D] of one layer; the first `length` positions of the first rows are in use.

    The first update holds the distinct prompts [U, H, L, D]; `rows` [B] says which of them each row of the batch has.
    """

    is_sliding = False

    def __init__(self, rows: torch.Tensor, spare: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows = rows
        self.spare = min(spare, SPARE_POSITIONS)
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys = self._expanded(key_states)
        self.values = self._expanded(value_states)
        self.length = key_states.shape[2]
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            return key_states, value_states
        end = self.length + key_states.shape[2]
        self.keys = self._stored(self.keys, key_states, end)
        self.values = self._stored(self.values, value_states, end)
        self.length = end
        num_rows = len(key_states)
        return self.keys[:num_rows, :, :end], self.values[:num_rows, :, :end]

    def fill(self, holes: torch.Tensor, movers: torch.Tensor) -> None:
        """Rows `movers` take the places of rows `holes`; what lies behind the new end of the batch is never read."""
        assert self.keys is not None
        assert self.values is not None
        for buffer in (self.keys, self.values):
            used = buffer[:, :, : self.length]
            used.index_copy_(0, holes, used.index_select(0, movers))

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def _expanded(self, states: torch.Tensor) -> torch.Tensor:
        _, num_heads, length, head_size = states.shape
        buffer = states.new_empty(len(self.rows), num_heads, length + self.spare, head_size)
        buffer[:, :, :length] = states.index_select(0, self.rows)
        return buffer

    def _stored(self, buffer: torch.Tensor | None, states: torch.Tensor, end: int) -> torch.Tensor:
        assert buffer is not None
        if end > buffer.shape[2]:
            kept = buffer[: len(states)]
            buffer = torch.cat([kept, torch.empty_like(kept)], dim=2)
        buffer[: len(states), :, end - states.shape[2] : end] = states
        return buffer


class RowCache(Cache):
    """One `RowLayer` per decoder layer, made as the model asks for them."""

    def __init__(self, rows: torch.Tensor, spare: int) -> None:
        super().__init__(layer_class_to_replicate=lambda: RowLayer(rows, spare))  # type: ignore[arg-type]

    def fill(self, holes: torch.Tensor, movers: torch.Tensor) -> None:
        for layer in self.layers:
            assert isinstance(layer, RowLayer)
            layer.fill(holes, movers)
