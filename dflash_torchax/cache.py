"""Key/value caches as pytrees, and the adapter that lends one to an HF forward inside a trace.

Slot == position for every row, so a cache needs no length of its own: the clock (`DecodeState.lengths`)
says which slots are history. Rejected rows lie beyond the clock and are overwritten by the next step.
"""

import dataclasses

import jax
import jax.numpy as jnp
from transformers.cache_utils import Cache, CacheLayerMixin

from . import bridge

# Up to this many rows are written one by one, in place; more rows go through one loop, to keep programs small.
_UNROLLED_ROWS = 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StaticKV:
    """One contiguous buffer per layer: `keys[l]`, `values[l]` of shape [batch, kv_heads, slots, head_dim]."""

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]

    @classmethod
    def create(cls, layout, batch_size, slots):
        """Zeroed buffers.

        Args:
            layout: per layer ((kv_heads, key_dim), (kv_heads, value_dim), dtype).
            batch_size: rows.
            slots: positions per row; must cover max_length + block_size, or a write would be clamped back.
        """
        keys = tuple(jnp.zeros((batch_size, k[0], slots, k[1]), dtype) for k, _, dtype in layout)
        values = tuple(jnp.zeros((batch_size, v[0], slots, v[1]), dtype) for _, v, dtype in layout)
        return cls(keys, values)

    def write(self, layer, key, value, starts):
        """A new cache with [batch, kv_heads, width, head_dim] written at slots `starts[b] ..`."""
        with jax.named_scope("cache_write"):
            keys = _replaced(self.keys, layer, write_rows(self.keys[layer], key, starts, axis=1))
            values = _replaced(self.values, layer, write_rows(self.values[layer], value, starts, axis=1))
        return StaticKV(keys, values)

    def read(self, layer):
        """All slots of a layer, (keys, values); the reader masks by position."""
        return self.keys[layer], self.values[layer]


def _replaced(items, index, item):
    return items[:index] + (item,) + items[index + 1 :]


def write_rows(buffer, update, starts, axis):
    """Write `update[b]` into `buffer[b]` at `starts[b]` along `axis` (counted without the batch axis).

    Plain dynamic slices stay in place under XLA; a batched one would become a scatter.
    """
    update = update.astype(buffer.dtype)

    def write(row, buffer):
        start = [row] + [0] * (buffer.ndim - 1)
        start[axis + 1] = starts[row]
        return jax.lax.dynamic_update_slice(buffer, jax.lax.dynamic_slice_in_dim(update, row, 1), start)

    batch_size = buffer.shape[0]
    if batch_size > _UNROLLED_ROWS:
        return jax.lax.fori_loop(0, batch_size, write, buffer)
    for row in range(batch_size):
        buffer = write(row, buffer)
    return buffer


class LentLayer(CacheLayerMixin):
    """One layer of a cache lent to HF code: `update` writes at the clock and returns what attention reads."""

    is_compileable = True

    def __init__(self, view, layer):
        super().__init__()
        self.view, self.layer = view, layer

    def lazy_initialization(self, key_states, value_states):
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        key, value = bridge.jax_view((key_states, value_states))
        return bridge.torch_view(self.view.update(self.layer, key, value))

    def get_mask_sizes(self, query_length):
        return query_length, 0

    def get_seq_length(self):
        return 0

    def get_max_length(self):
        return -1


class LentCache(Cache):
    """The HF face of an `attention.AttentionView`: as many layers as the model has."""

    def __init__(self, view, num_layers):
        super().__init__(layers=[LentLayer(view, layer) for layer in range(num_layers)])
