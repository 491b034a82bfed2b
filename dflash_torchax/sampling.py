"""Acceptance: which drafted tokens the target would have produced itself. Pure jax.numpy."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Verdict(NamedTuple):
    """num_accepted int32 [batch] in 0..block_size - 1, and the tokens to commit int32 [batch, block_size]:
    accepted draft tokens, then the bonus token at index num_accepted (the rest is meaningless)."""

    num_accepted: object
    tokens: object


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


def accept_greedy(drafted, posterior):
    """Accept the longest prefix of the draft that the target's argmax agrees with.

    Args:
        drafted: int32 [batch, block_size - 1].
        posterior: int32 [batch, block_size], the target's argmax after each slot of the block.
    """
    agrees = (drafted == posterior[:, :-1]).astype(jnp.int32)
    return Verdict(jnp.cumprod(agrees, axis=1).sum(axis=1), posterior)
