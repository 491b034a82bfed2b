"""`DecodeState`: everything a generation is, as one immutable pytree, with its invariants written once.

One clock: every position, RoPE offset, cache length and mask comes from `lengths`. The anchor is
`tokens[b, lengths[b] - 1]`; both caches hold history in slots below `lengths - 1`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from .sampling import Rules


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """State of a batch between two steps.

    Fields:
        tokens: int32 [batch, slots], prompt and committed tokens, right-padded.
        lengths: int32 [batch], the clock: committed tokens, anchor included.
        limits: int32 [batch], length at which a row is full.
        finished: bool [batch]; a finished row keeps running but its clock does not move.
        eos_ids: int32 [n], ids that end a row; -1 fills up.
        rules: how tokens are chosen, see `sampling.Rules`.
        target_cache, draft_cache: pytrees owned by the target and the proposer.
        num_steps: int32 [batch], steps a row took part in.
        num_drafted: int32 [batch], draft tokens that could have been committed.
        accepted_per_step: int32 [batch, slots], accepted draft tokens of each of a row's steps.
        keep_cache: static; the caches outlive the call, so that a finished row must not give its pages back.
    """

    tokens: jax.Array
    lengths: jax.Array
    limits: jax.Array
    finished: jax.Array
    eos_ids: jax.Array
    rules: Rules
    target_cache: object
    draft_cache: object
    num_steps: jax.Array
    num_drafted: jax.Array
    accepted_per_step: jax.Array
    keep_cache: bool = dataclasses.field(default=False, metadata={"static": True})

    @classmethod
    def create(cls, prompt, lengths, limits, eos_ids, rules, slots, target_cache, draft_cache, keep_cache=False):
        """A batch before its prompt was read: prompt [batch, width] right-padded, `lengths` its true lengths."""
        batch_size, width = prompt.shape
        per_row = jnp.zeros((batch_size,), jnp.int32)
        return cls(
            tokens=jnp.pad(prompt, ((0, 0), (0, slots - width))),
            lengths=lengths, limits=limits, finished=per_row.astype(bool), eos_ids=eos_ids, rules=rules,
            target_cache=target_cache, draft_cache=draft_cache, keep_cache=keep_cache,
            num_steps=per_row, num_drafted=per_row, accepted_per_step=jnp.zeros((batch_size, slots), jnp.int32),
        )

    @property
    def anchors(self):
        """int32 [batch]: the last committed token of each row, in neither cache yet."""
        return jnp.take_along_axis(self.tokens, self.lengths[:, None] - 1, axis=1)[:, 0]

    @property
    def starts(self):
        """int32 [batch]: slot and position of the anchor, where the next block begins."""
        return self.lengths - 1

    def positions(self, width):
        """int32 [batch, width]: positions (== slots) of the next block."""
        return self.starts[:, None] + jnp.arange(width, dtype=jnp.int32)


def check_invariants(state, block_size):
    """Raise AssertionError where a state (on the host) breaks an invariant; for tests and debugging."""
    lengths, limits = np.asarray(state.lengths), np.asarray(state.limits)
    slots = state.tokens.shape[1]
    assert (lengths >= 1).all(), lengths
    assert (lengths <= limits).all(), (lengths, limits)
    assert (limits + block_size <= slots).all(), "a block at the limit must fit, or its write would be clamped"
    assert (np.asarray(state.finished) | (lengths < limits)).all(), "a full row must be finished"
    accepted = np.asarray(state.accepted_per_step)
    assert (accepted >= 0).all()
    assert (accepted < max(block_size, 1)).all()


@dataclasses.dataclass(frozen=True)
class DecodeStats:
    """What speculation did in one call of generate.

    tau (`acceptance_length`) is committed tokens per step, bonus included, cut at eos and at the length limit; the
    last token committed by a step counts as its bonus, so it equals mean(accepted + 1) over all rows' steps.

    Fields:
        num_steps: steps summed over rows.
        num_drafted_tokens, num_accepted_tokens: draft tokens that could have been committed, and that were.
        acceptance_length, acceptance_rate: tau, and accepted / drafted (0.0 where nothing was drafted).
        accepted_by_position: share of steps that accepted the draft token at each position 1 .. block_size - 1.
        accepted_per_step: per row, the list of accepted draft tokens of each step.
        num_prefill_tokens: prompt tokens the prefill read; what a reused cache held is not among them.
    """

    num_steps: int
    num_drafted_tokens: int
    num_accepted_tokens: int
    acceptance_length: float
    acceptance_rate: float
    accepted_by_position: tuple[float, ...]
    accepted_per_step: list[list[int]]
    num_prefill_tokens: int = 0

    @classmethod
    def from_counts(cls, num_steps, num_drafted, accepted_per_step, block_size, num_prefill_tokens=0):
        """From host copies of the state's counters."""
        rows = [[int(n) for n in accepted_per_step[b, :steps]] for b, steps in enumerate(num_steps)]
        flat = np.array([n for row in rows for n in row], np.int64)
        steps, drafted, accepted = len(flat), int(np.sum(num_drafted)), int(flat.sum())
        return cls(
            num_steps=steps,
            num_drafted_tokens=drafted,
            num_accepted_tokens=accepted,
            acceptance_length=(accepted + steps) / steps if steps else 0.0,
            acceptance_rate=accepted / drafted if drafted else 0.0,
            accepted_by_position=tuple(float((flat >= k).mean()) if steps else 0.0 for k in range(1, block_size)),
            accepted_per_step=rows,
            num_prefill_tokens=num_prefill_tokens,
        )
