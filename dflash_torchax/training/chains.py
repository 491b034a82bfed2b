"""EAGLE-3's learner: the layer once over the sequence, then token by token along chains from random anchors.

A chain sees what drafting sees: fused features up to the slot before its anchor, then its own outputs ("training-time
test" in the paper), with the target's tokens as the tokens drafted so far.
"""

import jax.numpy as jnp

from .. import bridge
from ..attention import attend as attend_causally
from ..eagle3 import embed
from .blocks import block_attention
from .learner import Learner, take


class Eagle3Learner(Learner):
    """`Learner` of an `Eagle3DraftModel`; a chain drafts `draft.config.block_size - 1` tokens.

    Raises:
        ValueError: the draft does not fit the target, or the recipe asks for the regression: the head is the draft's own.
    """

    def __init__(self, draft, target, recipe):
        if recipe.losses.regression:
            raise ValueError("regression: EAGLE-3 has its own head, so its hidden states are not the target's; set it to 0.")
        super().__init__(draft, target, recipe)
        self.taps = draft.config.taps_for(target.num_layers)

    def _logits(self, params, frozen, hidden):
        return self.run({**params, **frozen.buffers}, lambda draft, x: draft.logits(x), hidden)

    def _hidden(self, params, frozen, batch, positions):
        """[rows, anchors, block_size - 1, hidden]: the layer's outputs along every chain."""
        tensors, anchors = {**params, **frozen.buffers}, positions[..., 0]
        feature = batch.features[..., : len(self.taps) * self.target.hidden_size].astype(jnp.float32)
        slots = jnp.broadcast_to(jnp.arange(feature.shape[1], dtype=jnp.int32), feature.shape[:2])
        following = jnp.pad(batch.ids[:, 1:], ((0, 0), (0, 1)))
        embedded = self._embed(tensors, frozen, following).astype(jnp.float32)
        sees_context = (slots[:, None, None] < anchors[..., None, None])
        context, chain = [], []

        def over_sequence(module, *tensors):
            query, key, value = bridge.jax_view(tensors)
            context.extend((key, value))
            return bridge.torch_view(attend_causally(query, key, value, slots, None, scaling=module.head_dim**-0.5))

        def along_chains(module, *tensors):
            query, *fresh = bridge.jax_view(tensors)
            chain.append(fresh)
            key, value = (_interleaved([step[i] for step in chain]) for i in (0, 1))
            sees_chain = jnp.ones((1, len(chain)), bool)
            out = block_attention(query, key, value, *context, sees_context, sees_chain, scaling=module.head_dim**-0.5)
            return bridge.torch_view(out)

        def first(draft, feature, embedded, slots):
            return draft.advance(embedded, draft.fuse(feature), slots, over_sequence)

        hidden = take(self.run(tensors, first, feature, embedded, slots), anchors - 1)
        outputs = [hidden]
        for step in range(self.block_size - 2):
            embedded = self._embed(tensors, frozen, take(batch.ids, anchors + 1 + step)).astype(jnp.float32)
            hidden = self.run(tensors, lambda draft, *args: draft.advance(*args, along_chains), embedded, hidden, anchors + step)
            outputs.append(hidden)
        return jnp.stack(outputs, axis=2)

    def _embed(self, tensors, frozen, ids):
        return embed(self.run, self.target, self.config, tensors, frozen.target, ids)


def _interleaved(steps):
    """Tensors [rows, kv_heads, anchors, head_dim] of each step -> [rows, kv_heads, anchors * steps, head_dim]."""
    stacked = jnp.stack(steps, axis=3)
    return stacked.reshape(*stacked.shape[:2], -1, stacked.shape[-1])
