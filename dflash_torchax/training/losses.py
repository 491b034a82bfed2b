"""Losses over blocks of drafted positions, and how many of them the target would accept. Pure jax.numpy."""

import dataclasses

import jax
import jax.numpy as jnp

from ..sampling import greedy

# Width of exp(-(k-1)/gamma) for the block sizes of the paper; other sizes take half a block.
_PAPER_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}


@dataclasses.dataclass(frozen=True)
class LossWeights:
    """Share of each term of the loss.

    Fields:
        tokens: cross-entropy on the target's own tokens.
        distillation: cross-entropy on the target's distribution (temperature 1).
        regression: squared distance to the target's final hidden state, relative to its squared norm.
    """

    tokens: float = 1.0
    distillation: float = 0.0
    regression: float = 0.0

    @property
    def needs_target(self):
        """Whether the target's final hidden states are read."""
        return self.distillation > 0 or self.regression > 0


def default_gamma(block_size):
    """The paper's gamma for a block of that many slots."""
    return _PAPER_GAMMA.get(block_size, max(block_size / 2, 1.0))


def position_weights(block_size, gamma):
    """float32 [block_size - 1]: exp(-(k-1)/gamma) for the drafted positions k = 1 .. block_size - 1."""
    return jnp.exp(-jnp.arange(block_size - 1, dtype=jnp.float32) / gamma)


def weighted_loss(logits, labels, weights, terms, *, hidden=None, target_hidden=None, target_logits=None):
    """Weighted mean over drafted positions of the terms asked for.

    Args:
        logits: float32 [..., vocab] of the draft.
        labels: int32 [...], columns of `logits`; negative where the label is outside the (active) vocabulary.
        weights: float32 [...], 0 where a position does not exist.
        terms: `LossWeights`.
        hidden, target_hidden: [..., hidden], for the regression.
        target_logits: float32 [..., vocab], for the distillation.

    Returns:
        (loss, dict of the single terms).
    """
    log_q = jax.nn.log_softmax(logits, axis=-1)
    known = jnp.where(labels >= 0, weights, 0.0)
    parts = {"tokens": _mean(-jnp.take_along_axis(log_q, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0], known)}
    if terms.distillation:
        parts["distillation"] = _mean(-(jax.nn.softmax(target_logits, axis=-1) * log_q).sum(-1), weights)
    if terms.regression:
        target_hidden = target_hidden.astype(jnp.float32)
        distance = jnp.square(hidden.astype(jnp.float32) - target_hidden).sum(-1)
        # Where nothing exists the target is zero: the floor keeps 0 / 0 out of the gradient.
        parts["regression"] = _mean(distance / jnp.maximum(jnp.square(target_hidden).sum(-1), 1e-6), weights)
    return sum(getattr(terms, name) * value for name, value in parts.items()), parts


def accepted(logits, labels, exists):
    """int32 [...]: drafted tokens of each block [..., positions] that agree with the labels before the first miss."""
    agrees = (greedy(logits) == labels) & exists
    return jnp.cumprod(agrees.astype(jnp.int32), axis=-1).sum(-1)


def _mean(values, weights):
    return (values * weights).sum() / jnp.maximum(weights.sum(), 1e-6)
