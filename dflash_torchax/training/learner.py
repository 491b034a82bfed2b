"""What every learner shares: its batch, its recipe, what it reads without training it, and where its blocks stand.

A learner has `params` (trained, float32), `buffers`, `taps`, `block_size` and `outcome(params, frozen, batch, anchors, exists)`.
"""

import dataclasses
import zlib
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .. import bridge
from .losses import LossWeights, accepted, position_weights, weighted_loss


class Batch(NamedTuple):
    """Sequences to learn from: ids int32 [rows, width] right-padded, prompt_lengths and lengths int32 [rows], features
    [rows, width, layers * hidden] (the draft's taps, then the target's final hidden state)."""

    ids: object
    prompt_lengths: object
    lengths: object
    features: object


class Outcome(NamedTuple):
    """What a learner makes of a batch: the loss, its terms, drafted tokens accepted at each anchor int32 [rows, anchors],
    and which anchors exist bool [rows, anchors]."""

    loss: object
    terms: dict
    accepted: object
    exists: object


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a learner looks at a sequence. Static.

    Fields:
        anchors: random anchors per sequence and step.
        gamma: decay of the position weights.
        losses: `LossWeights`.

    Raises:
        ValueError: gamma is not above 0, or there are no anchors.
    """

    anchors: int
    gamma: float
    losses: LossWeights

    def __post_init__(self):
        if self.anchors < 1 or self.gamma <= 0:
            raise ValueError(f"anchors, gamma: {self.anchors}, {self.gamma}; take at least 1 anchor and a gamma above 0.")


class Frozen(NamedTuple):
    """What a learner reads and does not train: the target's parameters, the parameters its head runs on (all rows or the
    active ones), the column of each id among those rows (None: all), the draft's buffers."""

    target: dict
    head: dict
    columns: object
    buffers: dict


class Learner:
    """Loss and acceptance of a draft on a batch.

    Args:
        draft: the HF module; its weights are where training starts.
        target: `target.Target`; the draft multiplies in its `products` dtype too.
        recipe: `Recipe`.

    A subclass sets `taps` and gives `_hidden(params, frozen, batch, positions)`, the draft's states that guess
    positions[..., 1:], and `_logits(params, frozen, hidden)`.
    """

    def __init__(self, draft, target, recipe):
        draft.config.check_fits(target)
        self.target, self.recipe, self.config = target, recipe, draft.config
        self.block_size = draft.config.block_size
        self.run = bridge.functionalize(draft, target.run.platform, target.run.products)
        self.params, self.buffers = tensors_of(draft)
        self.identity = identity_of(draft)

    def outcome(self, params, frozen, batch, anchors, exists):
        """`Outcome` of the draft at `anchors` int32 [rows, anchors] (where `exists`).

        Args:
            params: the draft's trainable parameters.
            frozen: `Frozen`.
            batch: `Batch`.
        """
        positions = anchors[..., None] + jnp.arange(self.block_size, dtype=jnp.int32)  # [rows, anchors, block]
        labels = take(batch.ids, positions[..., 1:])
        real = exists[..., None] & (positions[..., 1:] < batch.lengths[:, None, None])
        hidden = self._hidden(params, frozen, batch, positions)
        logits = self._logits(params, frozen, hidden).astype(jnp.float32)
        columns = labels if frozen.columns is None else frozen.columns[labels]
        extra = {}
        if self.recipe.losses.needs_target:
            final = batch.features[..., -self.target.hidden_size :]
            extra = {"target_hidden": take(final, positions[..., :-1]), "hidden": hidden}
            if self.recipe.losses.distillation:
                extra["target_logits"] = self.target.head(frozen.head, extra["target_hidden"].astype(self.target.dtype))
        weights = real * position_weights(self.block_size, self.recipe.gamma)
        loss, terms = weighted_loss(logits, columns, weights, self.recipe.losses, **extra)
        return Outcome(loss, terms, accepted(logits, columns, real), exists)


def tensors_of(draft):
    """(trained, only read) tensors of a draft, name -> float32 array: buffers and an embedding of its own stay as they are."""
    tensors = bridge.params_of(draft, dtype=jnp.float32)
    fixed = {"embed_tokens.weight", *(name for name, _ in draft.named_buffers())} & tensors.keys()
    return {name: tensor for name, tensor in tensors.items() if name not in fixed}, {name: tensors[name] for name in fixed}


def identity_of(draft):
    """What a run of this draft keeps to, beside the shapes of its parameters; JSON-able."""
    config, ids = draft.config, getattr(draft, "vocabulary", None)
    taps = config.target_layer_ids
    return {
        "block_size": config.block_size, "taps": None if taps is None else list(taps),
        "mask_token_id": getattr(config, "mask_token_id", None),
        "draft_vocabulary": None if ids is None else f"{len(ids)} ids, crc32 {zlib.crc32(ids.int().numpy().tobytes()):08x}",
    }


def sample_anchors(key, batch, count):
    """Random distinct anchors of each row's continuation: (int32 [rows, count], bool [rows, count] which exist).

    An anchor is a generated token with at least one more behind it. A batch narrower than `count` gives as many as it has slots.
    """
    slot = jnp.arange(batch.ids.shape[1], dtype=jnp.int32)
    allowed = (slot >= batch.prompt_lengths[:, None]) & (slot < batch.lengths[:, None] - 1)
    scores = jnp.where(allowed, jax.random.uniform(key, allowed.shape), -1.0)
    scores, anchors = jax.lax.top_k(scores, min(count, allowed.shape[1]))
    return anchors.astype(jnp.int32), scores >= 0


def spread_anchors(batch, count):
    """The same for evaluation: anchors evenly spread over each continuation, no randomness."""
    first, number = batch.prompt_lengths[:, None], jnp.maximum(batch.lengths - 1 - batch.prompt_lengths, 0)[:, None]
    index = jnp.arange(count, dtype=jnp.int32)[None]
    anchors = first + jnp.where(number > count, (index * number) // count, index)
    return jnp.minimum(anchors, batch.ids.shape[1] - 1), index < number


def take(values, positions):
    """values [rows, width, ...] at positions [rows, ...] along the width; positions beyond it read the last slot."""
    flat = jnp.minimum(positions, values.shape[1] - 1).reshape(positions.shape[0], -1)
    index = flat.reshape(*flat.shape, *[1] * (values.ndim - 2))
    return jnp.take_along_axis(values, index, axis=1).reshape(*positions.shape, *values.shape[2:])
