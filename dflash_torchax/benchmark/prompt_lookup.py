"""Prompt lookup as a proposer: draft what followed the last occurrence of the newest tokens. No weights."""

import jax
import jax.numpy as jnp

from ..proposers import Proposal

_LONGEST_NGRAM = 3


class PromptLookup:
    """Drafts the tokens after the most recent match of the last 3, else 2, else 1 tokens, in the compiled loop.

    Args:
        block_size: anchor and drafted tokens.
    """

    taps = ()
    params = ()

    def __init__(self, block_size):
        self.block_size = block_size

    def create_cache(self, batch_size, slots):
        return ()

    def inject(self, params, cache, feature, starts, positions):
        return cache

    def propose(self, params, target_params, state):
        with jax.named_scope("prompt_lookup"):
            follows = last_match_end(state.tokens, state.lengths)
            index = follows[:, None] + jnp.arange(self.block_size - 1, dtype=jnp.int32)
            index = jnp.minimum(index, state.lengths[:, None] - 1)  # a match near the end runs into the anchor
            return Proposal(jnp.take_along_axis(state.tokens, index, axis=1), state.draft_cache)


def last_match_end(tokens, lengths):
    """int32 [batch]: slot after the longest, then latest, earlier occurrence of each row's newest tokens.

    Without any match it is the anchor's slot, so that the anchor is drafted again.

    Args:
        tokens: int32 [batch, slots].
        lengths: int32 [batch], tokens that count.
    """
    slots = tokens.shape[1]
    slot = jnp.arange(slots, dtype=jnp.int32)
    run = jnp.ones(tokens.shape, bool)
    longest = jnp.zeros(tokens.shape, jnp.int32)
    for back in range(_LONGEST_NGRAM):  # does the token `back` before this slot equal the one `back` before the anchor?
        wanted = jnp.take_along_axis(tokens, jnp.maximum(lengths[:, None] - 1 - back, 0), axis=1)
        run &= (jnp.roll(tokens, back, axis=1) == wanted) & (slot >= back)
        longest = longest + run
    candidate = (slot < lengths[:, None] - 1) & (longest > 0)
    best = jnp.argmax(jnp.where(candidate, longest * slots + slot, -1), axis=1).astype(jnp.int32)
    return jnp.where(candidate.any(axis=1), best + 1, lengths - 1)
