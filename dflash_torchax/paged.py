"""`PagedKV`: the target's cache as a pool of pages, a table of pages per row, and a stack of free pages, all on the device.

Pages are taken as rows grow and given back when rows end, inside the compiled loop. On TPU the Pallas ragged paged
attention kernel that ships in jax reads the pages; elsewhere they are gathered into contiguous slots.
"""

import dataclasses

import jax
import jax.numpy as jnp

from .attention import attend
from .cache import KVCache, replaced
from .sharding import Placement

# Up to this many pages are written one by one, in place; more go through one scatter.
_UNROLLED_PAGES = 8
# Keys and queries per inner block of the Pallas kernel, and the VMEM it may take: a quarter of the smallest chip's.
_KV_BLOCK_TOKENS = 512
_QUERY_BLOCK = 32
_KERNEL_VMEM = 32 << 20


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedKV(KVCache):
    """Pool, table and free stack; slot s of row b is token `s % page_size` of page `table[b, s // page_size]`.

    Page 0 of each pool is nobody's: unreserved slots lie there, and nothing written there is ever visible. With data
    axes on a mesh every data shard has a pool, a stack and page numbers of its own; `groups` is their number.

    Fields:
        pages: per layer [groups * pool, page_size, 2 * kv_heads, head_dim]; even heads are keys, odd ones values.
        table: int32 [batch, pages_per_row].
        held: int32 [batch], pages each row holds.
        free: int32 [groups * pool], per group a stack of free pages.
        num_free: int32 [groups], height of each stack.
        kernel: read pages with the Pallas TPU kernel.
        fixed: the pool keeps its size when rows get longer (the user chose it).
    """

    pages: tuple[jax.Array, ...]
    table: jax.Array
    held: jax.Array
    free: jax.Array
    num_free: jax.Array
    kernel: bool = dataclasses.field(default=False, metadata={"static": True})
    fixed: bool = dataclasses.field(default=False, metadata={"static": True})
    placement: Placement = dataclasses.field(default=Placement(), metadata={"static": True})

    index_dims = ("data", None)

    @classmethod
    def create(cls, layout, batch_size, pages_per_row, page_size, num_pages, kernel=False, fixed=False, placement=Placement()):  # noqa: B008
        """An empty cache.

        Args:
            layout: per layer ((kv_heads, head_dim), (kv_heads, head_dim), dtype).
            pages_per_row: width of the table.
            page_size: tokens per page.
            num_pages: pages of each pool, page 0 included.

        Raises:
            ValueError: a layer's keys and values differ in shape.
        """
        groups = placement.num_data

        def pool(key, value, dtype):
            if key != value:
                raise ValueError(
                    f"cache: 'paged' needs keys and values of one shape, this model has {key} and {value}; use cache='static'."
                )
            array = jnp.zeros((groups * num_pages, page_size, 2 * key[0], key[1]), dtype)
            return placement.constrain(array, "data", None, placement.split(key[0]), None)

        numbers = jnp.tile(jnp.arange(1, num_pages + 1, dtype=jnp.int32) % num_pages, groups)
        return cls(
            pages=tuple(pool(*entry) for entry in layout),
            table=jnp.zeros((batch_size, pages_per_row), jnp.int32),
            held=jnp.zeros((batch_size,), jnp.int32),
            free=numbers,
            num_free=jnp.full((groups,), num_pages - 1, jnp.int32),
            kernel=kernel,
            fixed=fixed,
            placement=placement,
        )

    @property
    def page_size(self):
        return self.pages[0].shape[1]

    def reserve(self, ends):
        """Give each row pages for its slots `< ends[b]` (int32 [batch]); a row that has them keeps what it has.

        A pool that runs dry hands out page 0: the caller sizes it beforehand (`cache_factory.PagedCache.check_room`).
        """
        row = ("data",)
        run = self.placement.map(self._take, (("data", None), row, row, row, row), [("data", None), row, row])
        with jax.named_scope("reserve_pages"):
            table, held, num_free = run(self.table, self.held, self.free, self.num_free, ends)
        return dataclasses.replace(self, table=table, held=held, num_free=num_free)

    def release(self, rows):
        """Take back all pages of the rows where `rows` (bool [batch]) is true."""
        return self.trim(jnp.where(rows, 0, self.table.shape[1] * self.page_size))

    def trim(self, ends):
        """Take back the pages that hold only slots `>= ends[b]` (int32 [batch])."""
        row = ("data",)
        kept = (ends + self.page_size - 1) // self.page_size
        run = self.placement.map(_give_back, (("data", None), row, row, row, row), [("data", None), row, row, row])
        with jax.named_scope("release_pages"):
            table, held, free, num_free = run(self.table, self.held, self.free, self.num_free, kept)
        return dataclasses.replace(self, table=table, held=held, free=free, num_free=num_free)

    def grow(self, slots):
        """The same history with room for `slots` slots a row; a pool of fixed size keeps its pages."""
        columns = max(-(-slots // self.page_size) - self.table.shape[1], 0)
        extra = 0 if self.fixed else columns * self.table.shape[0] // self.placement.num_data
        table = jnp.pad(self.table, ((0, 0), (0, columns)))
        if not extra:
            return dataclasses.replace(self, table=table)

        def more(pages, free, num_free):
            fresh = jnp.arange(free.shape[0], free.shape[0] + extra, dtype=jnp.int32)
            free = jax.lax.dynamic_update_slice(jnp.pad(free, (0, extra)), fresh, num_free)
            return [tuple(jnp.pad(pool, ((0, extra), (0, 0), (0, 0), (0, 0))) for pool in pages), free, num_free + extra]

        dims = self.dims()
        specs = [dims.pages, dims.free, dims.num_free]
        pages, free, num_free = self.placement.map(more, tuple(specs), specs)(self.pages, self.free, self.num_free)
        return dataclasses.replace(self, pages=pages, table=table, free=free, num_free=num_free)

    def read(self, layer):
        """All slots of a layer, gathered: (keys, values) of [batch, kv_heads, slots, head_dim]. Without a mesh."""
        return _gathered(self.pages[layer], self.table)

    @property
    def index(self):
        return self.table

    def buffers(self, layer):
        return self.pages[layer]

    def with_buffers(self, layer, buffers):
        return dataclasses.replace(self, pages=replaced(self.pages, layer, buffers))

    def dims(self):
        """The cache with each array replaced by its named dimensions."""
        pages = tuple(self.buffer_dims(layer) for layer in range(len(self.pages)))
        row = ("data",)
        return dataclasses.replace(self, pages=pages, table=("data", None), held=row, free=row, num_free=row)

    def heads_dim(self, layer):
        return self.placement.split(self.pages[layer].shape[2] // 2)

    def buffer_dims(self, layer):
        return ("data", None, self.heads_dim(layer), None)

    def write_part(self, pages, table, key, value, starts):
        """Read, merge and write back the pages that a block touches: whole pages keep the update in place."""
        batch_size, heads, width, dim = key.shape
        page_size = pages.shape[1]
        touched = min((width + page_size - 2) // page_size + 1, table.shape[1])
        first = starts // page_size
        numbers = jnp.take_along_axis(table, jnp.minimum(first[:, None] + jnp.arange(touched), table.shape[1] - 1), axis=1)
        # Past the table's end the last page would be touched twice: those writes go to page 0.
        numbers = jnp.where(first[:, None] + jnp.arange(touched) < table.shape[1], numbers, 0)
        fresh = (
            jnp.stack([key, value], axis=2).transpose(0, 3, 1, 2, 4).reshape(batch_size, width, 2 * heads, dim).astype(pages.dtype)
        )
        offsets = starts - first * page_size
        if batch_size * touched <= _UNROLLED_PAGES:
            return _write_one_by_one(pages, numbers, fresh, offsets)
        return _write_at_once(pages, numbers, fresh, offsets)

    def attend_part(
        self, pages, table, query, positions, last_visible, *, scaling, window=None, softcap=None, sinks=None, symmetric=False
    ):
        if self.kernel and sinks is None and last_visible is None:
            return _kernel_attention(pages, table, query, positions[:, 0], scaling, window, softcap)
        keys, values = _gathered(pages, table)
        return attend(
            query,
            keys,
            values,
            positions,
            last_visible,
            scaling=scaling,
            window=window,
            softcap=softcap,
            sinks=sinks,
            symmetric=symmetric,
        )

    def _take(self, table, held, free, num_free, ends):
        page_size, pages_per_row = self.page_size, table.shape[1]
        needed = jnp.minimum((ends + page_size - 1) // page_size, pages_per_row)
        need = jnp.maximum(needed - held, 0)
        first = num_free[0] - jnp.cumsum(need)  # a row takes stack entries first .. first + need - 1
        column = jnp.arange(pages_per_row, dtype=jnp.int32) - held[:, None]
        entry = first[:, None] + column
        taking = (column >= 0) & (column < need[:, None])
        page = jnp.where(entry >= 0, free[jnp.clip(entry, 0, free.shape[0] - 1)], 0)
        return [jnp.where(taking, page, table), held + need, num_free - need.sum()]


def _give_back(table, held, free, num_free, kept):
    kept = jnp.minimum(kept, held)
    count = held - kept
    above = num_free[0] + jnp.cumsum(count) - count
    column = jnp.arange(table.shape[1], dtype=jnp.int32) - kept[:, None]
    given = (column >= 0) & (column < count[:, None])
    entry = jnp.where(given, above[:, None] + column, free.shape[0])
    free = free.at[entry].set(table, mode="drop")
    return [jnp.where(given, 0, table), kept, free, num_free + count.sum()]


def _gathered(pages, table):
    batch_size, (_, _, combined, dim) = table.shape[0], pages.shape
    slots = pages[table].reshape(batch_size, -1, combined // 2, 2, dim)
    slots = slots.transpose(3, 0, 2, 1, 4)
    return slots[0], slots[1]


def _write_one_by_one(pages, numbers, fresh, offsets):
    page_size = pages.shape[1]
    for row in range(numbers.shape[0]):
        window = jnp.concatenate([jax.lax.dynamic_slice_in_dim(pages, number, 1)[0] for number in numbers[row]])
        window = jax.lax.dynamic_update_slice_in_dim(window, fresh[row], offsets[row], 0)
        for i, number in enumerate(numbers[row]):
            pages = jax.lax.dynamic_update_slice_in_dim(pages, window[None, i * page_size : (i + 1) * page_size], number, 0)
    return pages


def _write_at_once(pages, numbers, fresh, offsets):
    batch_size, touched = numbers.shape
    window = pages[numbers].reshape(batch_size, -1, *pages.shape[2:])
    window = jax.vmap(_merged)(window, fresh, offsets)
    return pages.at[numbers].set(window.reshape(batch_size, touched, *pages.shape[1:]))


def _merged(window, fresh, offset):
    """`fresh` [width, ...] laid over `window` [tokens, ...] from `offset` on; what sticks out is dropped."""
    index = jnp.arange(window.shape[0], dtype=jnp.int32) - offset
    inside = (index >= 0) & (index < fresh.shape[0])
    return jnp.where(inside[:, None, None], fresh[jnp.clip(index, 0, fresh.shape[0] - 1)], window)


def _kernel_attention(pages, table, query, starts, scaling, window, softcap):
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    batch_size, heads, width, dim = query.shape
    tokens = query.transpose(0, 2, 1, 3).reshape(batch_size * width, heads, dim)
    # Mosaic refuses a float32 contraction of bfloat16 operands.
    with jax.default_matmul_precision("highest" if query.dtype == jnp.float32 else "default"):
        out = ragged_paged_attention(
            tokens,
            pages,
            starts + width,
            table,
            jnp.arange(batch_size + 1, dtype=jnp.int32) * width,
            jnp.array([batch_size], jnp.int32),
            sm_scale=scaling,
            sliding_window=window,
            soft_cap=softcap,
            num_kv_pages_per_block=max(1, min(_KV_BLOCK_TOKENS // pages.shape[1], table.shape[1])),
            num_queries_per_block=min(_QUERY_BLOCK, batch_size * width),
            vmem_limit_bytes=_KERNEL_VMEM,
        )
    return out.reshape(batch_size, width, heads, dim)
