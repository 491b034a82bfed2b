"""DFlash's learner: all blocks of a sequence in one masked forward of the draft.

Block j stands at a random anchor of the continuation. Its queries read the context K/V of the slots before the anchor
and the block's own K/V, exactly what they read while generating.
"""

import jax
import jax.numpy as jnp

from .. import bridge
from .learner import Learner, take


class DFlashLearner(Learner):
    """`Learner` of a `DFlashDraftModel`."""

    def __init__(self, draft, target, recipe):
        super().__init__(draft, target, recipe)
        self.taps = draft.config.target_layer_ids

    def _logits(self, params, frozen, hidden):
        logits = self.target.unembed(frozen.head, hidden.astype(self.target.dtype))
        return self.run({**params, **frozen.buffers}, lambda draft, x: draft.finish_logits(x), logits)

    def _hidden(self, params, frozen, batch, positions):
        """[rows, anchors, block - 1, hidden]: the draft's hidden states of every block, without its anchor's."""
        rows, count, block = positions.shape
        masks = jnp.full((rows, count, block - 1), self.config.mask_token_id, jnp.int32)
        ids = jnp.concatenate([take(batch.ids, positions[..., :1]), masks], axis=-1).reshape(rows, -1)
        noise = self.target.embed(frozen.target, ids) * self.config.input_embedding_scale
        feature = batch.features[..., : len(self.taps) * self.target.hidden_size].astype(jnp.float32)
        slots = jnp.broadcast_to(jnp.arange(feature.shape[1], dtype=jnp.int32), feature.shape[:2])
        anchors = positions[..., 0]

        def body(draft, feature, noise, slots, positions):
            context = draft.inject_context(feature, slots)

            def attend(module, *block_tensors):
                tensors = bridge.jax_view((*block_tensors, *context[module.layer_idx]))
                seen = visibility(anchors, block, feature.shape[1], causal=module.is_causal, window=module.sliding_window)
                return bridge.torch_view(block_attention(*tensors, *seen, scaling=module.head_dim**-0.5))

            return draft.denoise(noise, positions, attend)

        tensors = {**params, **frozen.buffers}
        hidden = self.run(tensors, body, feature, noise.astype(jnp.float32), slots, positions.reshape(rows, -1))
        return hidden.reshape(rows, count, block, -1)[:, :, 1:]


def block_attention(query, key, value, context_key, context_value, sees_context, sees_block, *, scaling):
    """Attention of many blocks of one sequence: each reads the sequence's context and its own block.

    Args:
        query: [rows, heads, anchors * queries, head_dim].
        key, value: [rows, kv_heads, anchors * keys, head_dim], the blocks' own.
        context_key, context_value: [rows, kv_heads, width, head_dim].
        sees_context: bool [rows, anchors, queries, width]; sees_block: bool [queries, keys].

    Returns:
        [rows, anchors * queries, heads, head_dim].
    """
    rows, heads, total, dim = query.shape
    kv_heads, width, count = key.shape[1], context_key.shape[2], sees_context.shape[1]
    queries, keys, groups = total // count, key.shape[2] // count, heads // kv_heads
    # Per block one matrix of (head of the group, query) rows, so that both products are plain matrix products.
    query = query.reshape(rows, kv_heads, groups, count, queries, dim).swapaxes(2, 3).reshape(rows, kv_heads, count, -1, dim)
    key, value = (x.reshape(rows, kv_heads, count, keys, dim) for x in (key, value))
    to_context = jnp.einsum("rkmd,rksd->rkms", query.reshape(rows, kv_heads, -1, dim), context_key,
                            preferred_element_type=jnp.float32)
    to_context = to_context.reshape(rows, kv_heads, count, groups, queries, width)
    to_block = jnp.einsum("rkamd,rkacd->rkamc", query, key, preferred_element_type=jnp.float32)
    to_block = to_block.reshape(rows, kv_heads, count, groups, queries, keys)
    lowest = jnp.finfo(jnp.float32).min
    to_context = jnp.where(sees_context[:, None, :, None], to_context * scaling, lowest)
    to_block = jnp.where(sees_block, to_block * scaling, lowest)
    weights = jax.nn.softmax(jnp.concatenate([to_context, to_block], axis=-1), axis=-1).astype(value.dtype)
    from_context, from_block = weights[..., :width], weights[..., width:]
    out = jnp.einsum("rkms,rksd->rkmd", from_context.reshape(rows, kv_heads, -1, width), context_value,
                     preferred_element_type=jnp.float32).reshape(rows, kv_heads, count, -1, dim)
    out += jnp.einsum("rkamc,rkacd->rkamd", from_block.reshape(rows, kv_heads, count, -1, keys), value,
                      preferred_element_type=jnp.float32)
    out = out.reshape(rows, kv_heads, count, groups, queries, dim).transpose(0, 2, 4, 1, 3, 5)
    return out.reshape(rows, total, heads, dim).astype(query.dtype)


def visibility(anchors, block_size, width, *, causal, window):
    """(sees_context, sees_block) of DFlash blocks at `anchors` int32 [rows, anchors]; the window is that of a layer."""
    slot, offset = jnp.arange(width), jnp.arange(block_size)
    sees_context = jnp.broadcast_to((slot < anchors[..., None])[:, :, None], (*anchors.shape, block_size, width))
    behind = offset[:, None] - offset  # how far a key lies behind the query
    sees_block = behind >= 0 if causal else jnp.ones((block_size, block_size), bool)
    if window is not None:
        positions = anchors[..., None] + offset
        sees_context &= slot > positions[..., None] - window
        sees_block &= jnp.abs(behind) < window
    return sees_context, sees_block
