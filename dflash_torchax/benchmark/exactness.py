"""Where two outputs part, and how close the target's choice was there."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from ..attention import AttentionView
from ..cache import StaticKV
from ..engine import bucket


def first_difference(expected, got):
    """Index of the first token in which two lists differ (one may be longer), or None where they are equal."""
    for index, (a, b) in enumerate(zip(expected, got, strict=False)):
        if a != b:
            return index
    return None if len(expected) == len(got) else min(len(expected), len(got))


class Top2Gap:
    """The target's logit gap between its two best next tokens after a prefix: small gaps are near-ties.

    Args:
        engine: any engine of the target; its weights and lowering are used.
    """

    def __init__(self, engine):
        self.target, self.params = engine.decoder.target, engine.params.target
        self._logits = jax.jit(self._last_logits)

    def __call__(self, prefix):
        width = bucket(len(prefix), 32)
        ids = jnp.asarray(np.pad(np.array(prefix, np.int32), (0, width - len(prefix))))[None]
        best = np.sort(np.asarray(self._logits(self.params, ids, len(prefix))))[-2:]
        return float(best[1] - best[0])

    def _last_logits(self, params, ids, length):
        positions = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
        cache = StaticKV.create(self.target.layout, 1, ids.shape[1])
        view = AttentionView(cache, jnp.zeros((1,), jnp.int32), positions, positions)
        hidden = self.target.forward(params, ids, view).hidden
        return self.target.head(params, jax.lax.dynamic_slice_in_dim(hidden, length - 1, 1, axis=1))[0, 0]


def compare(prompts, expected, got, gap):
    """Per row None (equal) or {'position', 'expected', 'got', 'top2_gap'} of the first difference.

    Args:
        expected, got: new tokens per row.
        gap: `Top2Gap`.
    """
    return [_row(*row, gap) for row in zip(prompts, expected, got, strict=True)]


def _row(prompt, expected, got, gap):
    index = first_difference(expected, got)
    if index is None:
        return None
    at = functools.partial(_token_at, index)
    return {"position": index, "expected": at(expected), "got": at(got), "top2_gap": gap(list(prompt) + list(expected[:index]))}


def _token_at(index, tokens):
    return tokens[index] if index < len(tokens) else None
