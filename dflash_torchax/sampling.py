"""Choosing tokens and accepting drafts: greedy, sample-and-compare, and rejection sampling. Pure jax.numpy.

Every random number has a key of its own per (row, position, role). A token is committed at most once per position, and
whether it is depends only on earlier positions, so a number that went into a discarded guess may serve again.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from . import processors
from .processors import Prefix

# Roles of random numbers.
_TARGET, _DRAFT, _ACCEPT, _RESIDUAL = range(4)
_CHUNK = 256


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rules:
    """How a call chooses its tokens.

    Fields:
        processors: tuple of `processors.Rule`, in order.
        key: uint32 [2], the call's seed.
        pads: int32 [batch], left padding, which HF counts in lengths and takes for text; pad_id: int32, its id.
        do_sample: static; False takes the argmax.
        draft_sampling: static; "greedy" proposes the draft's argmax and commits samples of the target up to the first
            that differs (a one-hot proposal distribution: rejection and residual fall together in one sample);
            "probabilistic" samples the draft's marginals and accepts by rejection sampling.
    """

    processors: tuple
    key: jax.Array
    pads: jax.Array
    pad_id: jax.Array
    do_sample: bool = dataclasses.field(default=False, metadata={"static": True})
    draft_sampling: str = dataclasses.field(default="greedy", metadata={"static": True})

    @classmethod
    def greedy(cls, batch_size):
        """Plain argmax."""
        return cls((), jnp.zeros(2, jnp.uint32), jnp.zeros(batch_size, jnp.int32), jnp.zeros((), jnp.int32))

    @property
    def samples_drafts(self):
        return self.do_sample and self.draft_sampling == "probabilistic"


class Verdict(NamedTuple):
    """num_accepted int32 [batch] in 0..block_size - 1, and the tokens to commit int32 [batch, block_size]:
    accepted draft tokens, then the bonus token at index num_accepted (the rest is meaningless)."""

    num_accepted: object
    tokens: object


def choose(rules, logits, prefix):
    """The target's own tokens: float32 logits [batch, width, vocab] -> int32 [batch, width]."""
    logits = processors.apply(rules.processors, logits, prefix)
    if not rules.do_sample:
        return greedy(logits)
    return categorical(jax.nn.softmax(logits, axis=-1), _uniform(rules, prefix.lengths, _TARGET))


def accept(rules, drafted, draft_logits, logits, prefix):
    """Which drafted tokens stand.

    Args:
        drafted: int32 [batch, block_size - 1].
        draft_logits: float32 [batch, block_size - 1, vocab] they were sampled from, processed; None where they are
            not samples.
        logits: float32 [batch, block_size, vocab] of the target.
        prefix: of each slot of the block, drafted tokens included.
    """
    if draft_logits is None or not rules.samples_drafts:
        return accept_equal(drafted, choose(rules, logits, prefix))
    target = jax.nn.softmax(processors.apply(rules.processors, logits, prefix), axis=-1)
    return _accept_by_rejection(rules, drafted, jax.nn.softmax(draft_logits, axis=-1), target, prefix.lengths)


def accept_equal(drafted, posterior):
    """Accept the longest prefix of the draft that equals the target's own tokens int32 [batch, block_size]."""
    agrees = (drafted == posterior[:, :-1]).astype(jnp.int32)
    return Verdict(jnp.cumprod(agrees, axis=1).sum(axis=1), posterior)


def sample_draft(rules, logits, prefix):
    """Draw drafts from their marginals: (int32 [batch, width], the processed logits they were drawn from)."""
    logits = processors.apply(rules.processors, logits, prefix)
    return categorical(jax.nn.softmax(logits, axis=-1), _uniform(rules, prefix.lengths, _DRAFT)), logits


def _accept_by_rejection(rules, drafted, draft, target, positions):
    """Leviathan et al. (arXiv 2211.17192): accept with p/q, else sample the normalised max(p - q, 0)."""
    p = jnp.take_along_axis(target[:, :-1], drafted[..., None], axis=-1)[..., 0]
    q = jnp.take_along_axis(draft, drafted[..., None], axis=-1)[..., 0]
    accepted = (_uniform(rules, positions[:, :-1], _ACCEPT) * q < p).astype(jnp.int32)
    count = jnp.cumprod(accepted, axis=1).sum(axis=1)
    at = count[:, None, None]
    p_at = jnp.take_along_axis(target, at, axis=1)
    q_at = jnp.take_along_axis(jnp.pad(draft, ((0, 0), (0, 1), (0, 0))), at, axis=1)  # nothing was drafted after the block
    residual = jnp.maximum(p_at - q_at, 0)
    residual = jnp.where(residual.sum(-1, keepdims=True) > 0, residual, p_at)
    bonus = categorical(residual, _uniform(rules, jnp.take_along_axis(positions, count[:, None], axis=1), _RESIDUAL))
    return Verdict(count, jnp.pad(drafted, ((0, 0), (0, 1))).at[jnp.arange(len(count)), count].set(bonus[:, 0]))


def categorical(weights, uniform):
    """Sample unnormalised weights [..., vocab] by inverse CDF with one uniform number each; weight 0 is never taken.
    Where there is no positive finite weight the answer is -1, which `engine.check_sampled` turns into an error.

    Two levels, chunk then word: cheaper than noise per word, and more exact than one long cumulative sum.
    """
    vocab = weights.shape[-1]
    chunks = jnp.pad(weights, [(0, 0)] * (weights.ndim - 1) + [(0, -vocab % _CHUNK)])
    chunks = chunks.reshape(*weights.shape[:-1], -1, min(_CHUNK, chunks.shape[-1]))
    sums = chunks.sum(-1)
    chunk, rest = _inverse_cdf(sums, uniform * sums.sum(-1))
    inside = jnp.take_along_axis(chunks, chunk[..., None, None], axis=-2)[..., 0, :]
    token = chunk * chunks.shape[-1] + _inverse_cdf(inside, rest)[0]
    return jnp.where(sums.sum(-1) > 0, token, -1).astype(jnp.int32)


def _inverse_cdf(weights, point):
    """First index whose cumulative weight exceeds `point`, and what is left of `point` before it."""
    total = jnp.cumsum(weights, axis=-1)
    last_possible = jnp.where(weights > 0, jnp.arange(weights.shape[-1]), 0).max(-1)  # rounding may pass the end
    index = jnp.minimum((total <= point[..., None]).sum(-1), last_possible)
    before = jnp.take_along_axis(total - weights, index[..., None], axis=-1)[..., 0]
    return index, jnp.maximum(point - before, 0)


def _uniform(rules, positions, role):
    """float32 [batch, width] in [0, 1), one key per row, position and role."""
    key = jax.random.fold_in(jax.random.wrap_key_data(rules.key), role)
    rows = jnp.broadcast_to(jnp.arange(positions.shape[0])[:, None], positions.shape)
    draw = lambda row, position: jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, row), position))
    return jax.vmap(jax.vmap(draw))(rows, positions)


def greedy(logits):
    """[..., vocab] logits -> int32 [...] ids: the first maximum; NaN counts as one, as in torch.argmax."""
    return jax.lax.platform_dependent(logits, cpu=_first_maximum, default=_argmax)


def _argmax(logits):
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _first_maximum(logits):
    """Two plain reductions: XLA:CPU runs argmax's paired one several times slower."""
    ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    best = logits.max(axis=-1, keepdims=True)
    return jnp.where((logits == best) | jnp.isnan(logits), ids, logits.shape[-1] - 1).min(axis=-1)


def prefix_of(state, tokens, width):
    """The `Prefix` of the next `width` positions, where `tokens` holds what is committed and drafted."""
    lengths = state.lengths[:, None] + jnp.arange(width, dtype=jnp.int32)
    return Prefix(tokens, lengths, state.rules.pads, state.rules.pad_id)
