"""EAGLE-3's learner: the layer once over the sequence, then token by token along chains from random anchors.

A chain sees what drafting sees: fused features up to the slot before its anchor, then its own outputs ("training-time
test" in the paper), with the target's tokens as the tokens drafted so far.
"""

import jax.numpy as jnp

from .. import bridge
from ..attention import attend as attend_causally
from ..eagle3 import embed
from .blocks import block_attention
from .learner import Outcome, take
from .losses import accepted, position_weights, weighted_loss


class Eagle3Learner:
    """Loss and acceptance of an EAGLE-3 draft on a batch; a chain drafts `draft.config.block_size - 1` tokens.

    Args:
        draft: `Eagle3DraftModel`; its weights are where training starts.
        target: `target.Target`.
        recipe: `learner.Recipe`; the regression has no meaning here, since the head is the draft's own.

    Raises:
        ValueError: the draft does not fit the target, or the recipe asks for the regression.
    """

    def __init__(self, draft, target, recipe):
        draft.config.check_fits(target)
        if recipe.losses.regression:
            raise ValueError("regression: EAGLE-3 has its own head, so its hidden states are not the target's; set it to 0.")
        self.target, self.recipe, self.config = target, recipe, draft.config
        self.block_size = draft.config.block_size
        self.taps = draft.config.taps_for(target.num_layers)
        self.run = bridge.functionalize(draft, target.run.platform)
        tensors = bridge.params_of(draft, dtype=jnp.float32)
        fixed = {"embed_tokens.weight"} | {name for name, _ in draft.named_buffers()}
        self.params = {name: tensor for name, tensor in tensors.items() if name not in fixed}
        self.buffers = {name: tensor for name, tensor in tensors.items() if name in fixed}

    def outcome(self, params, frozen, batch, anchors, exists):
        """`Outcome` of chains at `anchors` int32 [rows, anchors] (where `exists`); see `DFlashLearner.outcome`."""
        positions = anchors[..., None] + jnp.arange(self.block_size, dtype=jnp.int32)
        labels = take(batch.ids, positions[..., 1:])
        real = exists[..., None] & (positions[..., 1:] < batch.lengths[:, None, None])
        hidden = self._hidden(params, frozen, batch, anchors)
        logits = self.run(self._tensors(params, frozen), lambda draft, x: draft.logits(x), hidden).astype(jnp.float32)
        columns = labels if frozen.columns is None else frozen.columns[labels]
        extra = {}
        if self.recipe.losses.distillation:
            final = take(batch.features[..., -self.target.hidden_size :], positions[..., :-1])
            extra["target_logits"] = self.target.head(frozen.head, final.astype(self.target.dtype))
        weights = real * position_weights(self.block_size, self.recipe.gamma)
        loss, terms = weighted_loss(logits, columns, weights, self.recipe.losses, **extra)
        return Outcome(loss, terms, accepted(logits, columns, real), exists)

    def _tensors(self, params, frozen):
        dtype = self.recipe.compute_dtype
        return {**{name: value.astype(dtype) for name, value in params.items()}, **frozen.buffers}

    def _hidden(self, params, frozen, batch, anchors):
        """[rows, anchors, block_size - 1, hidden]: the layer's outputs along every chain."""
        tensors, dtype = self._tensors(params, frozen), self.recipe.compute_dtype
        feature = batch.features[..., : len(self.taps) * self.target.hidden_size].astype(dtype)
        slots = jnp.broadcast_to(jnp.arange(feature.shape[1], dtype=jnp.int32), feature.shape[:2])
        following = jnp.pad(batch.ids[:, 1:], ((0, 0), (0, 1)))
        embedded = self._embed(tensors, frozen, following).astype(dtype)
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
            embedded = self._embed(tensors, frozen, take(batch.ids, anchors + 1 + step)).astype(dtype)
            hidden = self.run(tensors, lambda draft, *args: draft.advance(*args, along_chains), embedded, hidden, anchors + step)
            outputs.append(hidden)
        return jnp.stack(outputs, axis=2)

    def _embed(self, tensors, frozen, ids):
        return embed(self.run, self.target, self.config, tensors, frozen.target, ids)


def _interleaved(steps):
    """Tensors [rows, kv_heads, anchors, head_dim] of each step -> [rows, kv_heads, anchors * steps, head_dim]."""
    stacked = jnp.stack(steps, axis=3)
    return stacked.reshape(*stacked.shape[:2], -1, stacked.shape[-1])
