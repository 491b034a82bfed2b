"""Acceptance: which drafted tokens the target would have produced itself. Pure jax.numpy."""

from typing import NamedTuple

import jax.numpy as jnp


class Verdict(NamedTuple):
    """num_accepted int32 [batch] in 0..block_size - 1, and the tokens to commit int32 [batch, block_size]:
    accepted draft tokens, then the bonus token at index num_accepted (the rest is meaningless)."""

    num_accepted: object
    tokens: object


def accept_greedy(drafted, posterior):
    """Accept the longest prefix of the draft that the target's argmax agrees with.

    Args:
        drafted: int32 [batch, block_size - 1].
        posterior: int32 [batch, block_size], the target's argmax after each slot of the block.
    """
    agrees = (drafted == posterior[:, :-1]).astype(jnp.int32)
    return Verdict(jnp.cumprod(agrees, axis=1).sum(axis=1), posterior)
