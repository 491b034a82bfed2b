"""Key/value caches as pytrees, and the adapter that lends one to an HF forward inside a trace.

Slot == position for every row, so a cache needs no length of its own: the clock (`DecodeState.lengths`)
says which slots are history. Rejected rows lie beyond the clock and are overwritten by the next step.

A cache is `StaticKV` here or `paged.PagedKV`. Both have `reserve`, `release`, `write` and `attend`; the last two run
per device on a mesh, rows split over its data axes and kv heads over its model axes.
"""

import dataclasses

import jax
import jax.numpy as jnp
from transformers.cache_utils import Cache, CacheLayerMixin

from . import bridge, flash
from .attention import attend
from .sharding import Placement

# Up to this many rows are written one by one, in place; more rows go through one loop, to keep programs small.
_UNROLLED_ROWS = 8


class KVCache:
    """What the caches share: running a layer's write and attention on each device's own rows and heads.

    A subclass stores `buffers(layer)` (arrays of one layer) and `index` (arrays all layers share), with their
    dimensions as `sharding.Placement` names them, and works on local parts in `write_part` and `attend_part`.
    """

    def write(self, layer, key, value, starts):
        """A new cache with [batch, kv_heads, width, head_dim] written at slots `starts[b] ..`."""
        heads = self.heads_dim(layer)
        kv = ("data", heads, None, None)
        run = self.placement.map(
            self.write_part, (self.buffer_dims(layer), self.index_dims, kv, kv, ("data",)), self.buffer_dims(layer)
        )
        with jax.named_scope("cache_write"):
            return self.with_buffers(layer, run(self.buffers(layer), self.index, key, value, starts))

    def attend(self, layer, query, key, value, starts, positions, last_visible, *, sinks=None, **options):
        """Write a block's K/V and let its queries read the cache.

        Args:
            query: [batch, heads, width, head_dim]; key, value: [batch, kv_heads, width, head_dim] of the block.
            starts: [batch] slot of the first query.
            positions, last_visible: [batch, width] and [batch], see `attention.AttentionView`; last_visible None means causal.
            sinks, options: as in `attention.attend`.

        Returns:
            ([batch, width, heads, head_dim], the written cache).
        """
        heads = self.heads_dim(layer)
        kv, seen = ("data", heads, None, None), None if last_visible is None else ("data",)

        def part(buffers, index, query, key, value, starts, positions, last_visible, sinks):
            buffers = self.write_part(buffers, index, key, value, starts)
            out = self.attend_part(buffers, index, query, positions, last_visible, sinks=sinks, **options)
            return out, buffers

        dims = self.buffer_dims(layer)
        run = self.placement.map(
            part,
            (dims, self.index_dims, kv, kv, kv, ("data",), ("data", None), seen, None if sinks is None else (heads,)),
            (("data", None, heads, None), dims),
        )
        with jax.named_scope("attention"):
            out, buffers = run(self.buffers(layer), self.index, query, key, value, starts, positions, last_visible, sinks)
        return out, self.with_buffers(layer, buffers)

    def abstract(self):
        """The cache as `ShapeDtypeStruct`s that carry the shardings it has on its mesh."""

        def with_sharding(array, dims):
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=self.placement.sharding(*dims))

        return jax.tree.map(with_sharding, self, self.dims())


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StaticKV(KVCache):
    """One contiguous buffer per layer: `keys[l]`, `values[l]` of shape [batch, kv_heads, slots, head_dim]."""

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    placement: Placement = dataclasses.field(default=Placement(), metadata={"static": True})

    index, index_dims = (), ()

    @classmethod
    def create(cls, layout, batch_size, slots, placement=Placement()):  # noqa: B008 (frozen)
        """Zeroed buffers.

        Args:
            layout: per layer ((kv_heads, key_dim), (kv_heads, value_dim), dtype).
            batch_size: rows.
            slots: positions per row; must cover max_length + block_size, or a write would be clamped back.
        """

        def zeros(heads, dim, dtype):
            array = jnp.zeros((batch_size, heads, slots, dim), dtype)
            return placement.constrain(array, "data", placement.split(heads), None, None)

        keys = tuple(zeros(*k, dtype) for k, _, dtype in layout)
        values = tuple(zeros(*v, dtype) for _, v, dtype in layout)
        return cls(keys, values, placement)

    def reserve(self, ends):
        """Nothing to do: every slot exists from the start."""
        return self

    def release(self, rows):
        """Nothing to do: a row's slots are its own to the end."""
        return self

    def trim(self, ends):
        """Nothing to do: what lies behind `ends` is overwritten when it is needed."""
        return self

    def grow(self, slots):
        """The same history in `slots` slots, when there are fewer."""
        extra = max(slots - self.keys[0].shape[2], 0)
        pad = lambda buffers: tuple(jnp.pad(b, ((0, 0), (0, 0), (0, extra), (0, 0))) for b in buffers)
        return dataclasses.replace(self, keys=pad(self.keys), values=pad(self.values))

    def read(self, layer):
        """All slots of a layer, (keys, values); the reader masks by position."""
        return self.keys[layer], self.values[layer]

    def buffers(self, layer):
        return list(self.read(layer))

    def with_buffers(self, layer, buffers):
        keys = replaced(self.keys, layer, buffers[0])
        return dataclasses.replace(self, keys=keys, values=replaced(self.values, layer, buffers[1]))

    def dims(self):
        """The cache with each array replaced by its named dimensions."""
        per_layer = tuple(self.buffer_dims(layer)[0] for layer in range(len(self.keys)))
        return dataclasses.replace(self, keys=per_layer, values=per_layer)

    def heads_dim(self, layer):
        return self.placement.split(self.keys[layer].shape[1])

    def buffer_dims(self, layer):
        dims = ("data", self.heads_dim(layer), None, None)
        return [dims, dims]

    def write_part(self, buffers, index, key, value, starts):
        return [write_rows(buffer, new, starts, axis=1) for buffer, new in zip(buffers, (key, value), strict=True)]

    def attend_part(self, buffers, index, query, positions, last_visible, **options):
        if last_visible is not None and flash.fits(self.placement.platform, *buffers, **options):
            return flash.attend_to_row(query, *buffers, last_visible, scaling=options["scaling"])
        return attend(query, *buffers, positions, last_visible, **options)


def grown(cache, slots):
    """An earlier call's cache with at least `slots` slots; one without slots of its own passes unchanged."""
    return cache.grow(slots) if hasattr(cache, "grow") else cache


def trimmed(cache, ends):
    """An earlier call's cache of which only the first `ends[b]` tokens stay; one that needs no telling passes unchanged."""
    return cache.trim(ends) if hasattr(cache, "trim") else cache


def replaced(items, index, item):
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
