"""Attention of a drafted block on TPU with jax's Pallas flash kernel: its scores stay on the chip, whatever the context."""

import jax
import jax.numpy as jnp

# Keys and values a kernel step reads; the largest that divides the cache is taken.
_KEY_BLOCKS = (512, 256, 128)
# Rows of a bfloat16 tile.
_QUERY_TILE = 16
_LANES = 128


def fits(platform, key, value, *, window=None, softcap=None, sinks=None, **options):
    """Whether `attend_to_row` computes this attention: on TPU, whole lanes, nothing but a last visible slot to mask."""
    whole = key.shape[2] % _LANES == key.shape[3] % _LANES == 0 and key.shape == value.shape
    return platform == "tpu" and whole and window is None and softcap is None and sinks is None


def attend_to_row(query, key, value, last_visible, *, scaling):
    """`attention.attend` where all queries of a row see the same slots.

    Args:
        query: [batch, heads, width, head_dim].
        key, value: [batch, kv_heads, slots, head_dim]; slots and head_dim in whole lanes.
        last_visible: int32 [batch], last slot the row's queries may read.
        scaling: factor on the logits.

    Returns:
        [batch, width, heads, head_dim] in the query's dtype.
    """
    from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes, SegmentIds, flash_attention

    batch, heads, width, head_dim = query.shape
    kv_heads, slots = key.shape[1:3]
    # The query heads of a group are further queries of their kv head: nothing is repeated.
    grouped = query.reshape(batch, kv_heads, -1, head_dim)
    rows = grouped.shape[2]
    grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, -rows % _QUERY_TILE), (0, 0)))
    visible = jnp.arange(slots, dtype=jnp.int32) <= last_visible[:, None]
    segments = SegmentIds(q=jnp.ones((batch, grouped.shape[2]), jnp.int32), kv=visible.astype(jnp.int32))
    step = next(size for size in _KEY_BLOCKS if slots % size == 0)
    sizes = BlockSizes(block_q=grouped.shape[2], block_k_major=step, block_k=step, block_b=1)
    # Mosaic refuses a float32 contraction of bfloat16 operands.
    with jax.default_matmul_precision("highest" if query.dtype == jnp.float32 else "default"):
        out = flash_attention(grouped, key, value, segment_ids=segments, sm_scale=scaling, block_sizes=sizes)
    return out[:, :, :rows].reshape(batch, heads, width, head_dim).swapaxes(1, 2)
