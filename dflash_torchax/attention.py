"""Attention against a cache whose slot is its position, for HF modules and for the draft.

HF modules reach it by name through `AttentionInterface`. No mask function is registered on purpose: HF then
builds no mask, and the one used here is derived from the clock alone, whatever the architecture.
"""

import contextlib
import contextvars
import dataclasses

import jax
import jax.numpy as jnp
from transformers import AttentionInterface

from . import bridge

# Without "flash" in it: HF would go looking for a flash attention kernel of that name.
IMPLEMENTATION = "torchax_by_position"
_VIEW: contextvars.ContextVar["AttentionView"] = contextvars.ContextVar("dflash_torchax_attention_view")


@dataclasses.dataclass
class AttentionView:
    """What one traced forward sees of a cache: where it writes, and how far each query may look.

    Fields:
        cache: the cache pytree, replaced by every `attend`.
        starts: [batch] slot of the first query.
        positions: [batch, width] position (== slot) of each query.
        last_visible: [batch] last slot a row's queries may read; None for causal attention, where it is their position.
        fresh: layer -> the block's key and value, handed over by the cache and not yet attended to.
        calls: layers that attended, in order.
    """

    cache: object
    starts: jax.Array
    positions: jax.Array
    last_visible: jax.Array | None = None
    fresh: dict = dataclasses.field(default_factory=dict)
    calls: list = dataclasses.field(default_factory=list)

    def update(self, layer, key, value):
        """Take a layer's new K/V; it is written by `attend`, so that writing and reading are one per-device program."""
        self.fresh[layer] = (key, value)
        return key, value

    def attend(self, layer, query, key, value, **options):
        """Write the layer's K/V and attend: [batch, width, heads, head_dim]."""
        written = self.fresh.pop(layer, (None, None))
        if key is not written[0] or value is not written[1]:
            raise NotImplementedError(f"layer {layer} attends to other keys than it stored in its cache")
        self.calls.append(layer)
        out, self.cache = self.cache.attend(layer, query, key, value, self.starts, self.positions, self.last_visible, **options)
        return out


@contextlib.contextmanager
def lending(view):
    """Make `view` the one that HF modules attend through."""
    token = _VIEW.set(view)
    try:
        yield view
    finally:
        _VIEW.reset(token)


def attend(query, key, value, positions, last_visible, *, scaling, window=None, symmetric=False, softcap=None, sinks=None):
    """Grouped-query attention with a float32 softmax; K/V are never repeated to the query heads.

    Args:
        query: [batch, heads, width, head_dim].
        key, value: [batch, kv_heads, slots, head_dim].
        positions, last_visible: [batch, width] and [batch], see `AttentionView`; last_visible None means causal.
        scaling: factor on the logits.
        window: sliding window in positions, or None.
        symmetric: the window also bounds slots after the query (bidirectional attention).
        softcap: logits become softcap * tanh(logits / softcap).
        sinks: [heads] logits of an always visible slot without value (gpt-oss).

    Returns:
        [batch, width, heads, head_dim] in the query's dtype.
    """
    batch, heads, width, head_dim = query.shape
    kv_heads, slots = key.shape[1], key.shape[2]
    # Heads of a group and queries are one matrix dimension: with two, XLA:CPU runs the product up to three times slower.
    grouped = query.reshape(batch, kv_heads, -1, head_dim)
    logits = jnp.einsum("bkqd,bksd->bkqs", grouped, key, preferred_element_type=jnp.float32) * scaling
    logits = logits.reshape(batch, kv_heads, -1, width, slots)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    last_visible = positions if last_visible is None else last_visible[:, None]
    visible = visible_slots(slots, positions, last_visible, window, symmetric)[:, None, None]
    logits = jnp.where(visible, logits, jnp.finfo(jnp.float32).min)
    if sinks is not None:
        sink = sinks.reshape(1, kv_heads, -1, 1, 1).astype(jnp.float32)
        logits = jnp.concatenate([logits, jnp.broadcast_to(sink, (*logits.shape[:-1], 1))], axis=-1)
    weights = jax.nn.softmax(logits, axis=-1)[..., :slots].astype(value.dtype)
    weights = weights.reshape(batch, kv_heads, -1, slots)
    out = jnp.einsum("bkqs,bksd->bkqd", weights, value, preferred_element_type=jnp.float32)
    return out.reshape(batch, heads, width, value.shape[-1]).swapaxes(1, 2).astype(query.dtype)


def visible_slots(slots, positions, last_visible, window=None, symmetric=False):
    """[batch, width, slots] bool: which slots each query may read; last_visible [batch, width], or [batch, 1] for all."""
    slot = jnp.arange(slots, dtype=jnp.int32)
    visible = slot <= last_visible[..., None]
    if window is not None:
        visible &= slot > positions[..., None] - window
        if symmetric:
            visible &= slot < positions[..., None] + window
    return visible


def _hf_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, sliding_window=None,
                  softcap=None, s_aux=None, **kwargs):
    """The function HF attention modules call; shapes as in `transformers.AttentionInterface`."""
    if attention_mask is not None:
        raise NotImplementedError("attention_mask: this model builds its own attention mask, which would be ignored here")
    query, key, value, sinks = bridge.jax_view((query, key, value, s_aux))
    out = _VIEW.get().attend(
        getattr(module, "layer_idx", None), query, key, value,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window, softcap=softcap, sinks=sinks,
    )
    return bridge.torch_view(out), None


AttentionInterface.register(IMPLEMENTATION, _hf_attention)
