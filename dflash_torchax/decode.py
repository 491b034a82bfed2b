"""The whole algorithm: prefill, then step = propose, verify, accept, commit, until every row is finished.

Everything here is pure and traced; `engine` compiles it.
"""

import dataclasses

import jax
import jax.numpy as jnp

from .attention import AttentionView
from .cache import grown, trimmed, write_rows
from .cache_factory import StaticCache
from .proposers import Proposer
from .sampling import Rules, accept, choose, prefix_of
from .state import DecodeState
from .target import Target


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Params:
    """Weights as arguments of every program: the target's and the proposer's."""

    target: dict
    draft: object


@dataclasses.dataclass(frozen=True)
class Decoder:
    """Speculative decoding of `target` with `proposer`; the fields are static, all values are arguments."""

    target: Target
    proposer: Proposer
    cache: object = StaticCache()

    def prefill(self, params, prompt, lengths, limits, eos_ids, rules=None, *, slots, keep_cache=False):
        """Read the prompts and commit each row's first token.

        Args:
            prompt: int32 [batch, width], right-padded.
            lengths: int32 [batch], true prompt lengths, 1..width.
            limits: int32 [batch], total lengths not to exceed.
            eos_ids: int32 [n], filled up with -1.
            rules: `sampling.Rules`; None is greedy.
            slots: static; at least max(limits) + block_size.
            keep_cache: static, see `DecodeState`.
        """
        return self.first(*self.read_prompt(params, prompt, lengths, limits, eos_ids, rules, slots=slots, keep_cache=keep_cache))

    def read_prompt(self, params, prompt, lengths, limits, eos_ids, rules=None, *, slots, keep_cache=False):
        """The first half of `prefill`: (state, logits [batch, 1, vocab] after each prompt)."""
        batch_size, width = prompt.shape
        state = DecodeState.create(
            prompt, lengths, limits, eos_ids, rules or Rules.greedy(batch_size), slots,
            target_cache=self.cache.create(self.target, batch_size, slots),
            draft_cache=self.proposer.create_cache(batch_size, slots), keep_cache=keep_cache,
        )
        return self._read_rest(params, state, jnp.zeros_like(lengths), width)

    def resume_prompt(self, params, caches, known, prompt, lengths, limits, eos_ids, rules, *, slots, width):
        """As `read_prompt`, on the caches of an earlier call that hold each row's first `known[b]` tokens already.

        Args:
            caches: (target cache, draft cache), not consumed; shorter static ones are lengthened to `slots`.
            known: int32 [batch], below `lengths`.
            prompt: int32 [batch, slots].
            width: static; at least max(lengths - known) new tokens are read.
        """
        target_cache, draft_cache = (trimmed(grown(cache, slots), known) for cache in caches)
        state = DecodeState.create(prompt, lengths, limits, eos_ids, rules, slots, target_cache, draft_cache, keep_cache=True)
        return self._read_rest(params, state, known, width)

    def first(self, state, logits):
        """Commit each row's first token from the logits after its prompt."""
        chosen = self._everywhere(choose(state.rules, logits, prefix_of(state, state.tokens, 1)))
        return self._commit(state, chosen, jnp.zeros_like(state.lengths))

    def step(self, params, state):
        """One propose-verify-accept-commit round for every row."""
        state, proposal = self.propose(params, state)
        state, logits = self.verify(params, state, proposal.tokens)
        return self.commit(state, self.accept(state, proposal, logits))

    def propose(self, params, state):
        """(state with the draft's cache written, `Proposal`)."""
        proposal = self.proposer.propose(params.draft, params.target, state)
        state = dataclasses.replace(state, draft_cache=proposal.cache)
        return state, dataclasses.replace(proposal, tokens=self._everywhere(proposal.tokens))

    def accept(self, state, proposal, logits):
        """The `Verdict` on a verified proposal, each slot judged with the prefix it would have had."""
        tokens = write_rows(state.tokens, proposal.tokens, state.lengths, axis=0) if proposal.tokens.size else state.tokens
        prefix = prefix_of(state, tokens, logits.shape[1])
        return jax.tree.map(self._everywhere, accept(state.rules, proposal.tokens, proposal.logits, logits, prefix))

    def _everywhere(self, decision):
        """On a mesh what decides is replicated: every device accepts the same tokens."""
        return self.target.placement.constrain(decision)

    def decode_loop(self, params, state):
        """Step until every row is finished."""
        return jax.lax.while_loop(lambda s: ~s.finished.all(), lambda s: self.step(params, s), state)

    def verify(self, params, state, drafted):
        """The target on [anchor, drafted...]: (state with both caches written, logits [batch, block_size, vocab])."""
        block = jnp.concatenate([state.anchors[:, None], drafted], axis=1)
        ends = jnp.where(state.finished, 0, jnp.minimum(state.starts + block.shape[1], state.limits))
        state = dataclasses.replace(state, target_cache=state.target_cache.reserve(ends))
        state, hidden = self._read(params, state, block, state.starts, state.positions(block.shape[1]))
        return state, self.target.head(params.target, hidden)

    def commit(self, state, verdict):
        """Count a step and move the clock over what it commits; not moving it is the rollback."""
        active = ~state.finished
        before = state.lengths
        state = self._commit(state, verdict.tokens, verdict.num_accepted)
        committed = state.lengths - before
        room = jnp.minimum(self.proposer.block_size, state.limits - before)
        accepted = jnp.maximum(committed - 1, 0)[:, None]
        return dataclasses.replace(
            state,
            num_steps=state.num_steps + active,
            num_drafted=state.num_drafted + jnp.where(active, room - 1, 0),
            accepted_per_step=write_rows(state.accepted_per_step, accepted, state.num_steps, axis=0),
        )

    def _read_rest(self, params, state, known, width):
        """Read prompt tokens `known[b] ..` of each row, at most `width`: (state, logits after the last prompt token)."""
        state = dataclasses.replace(state, target_cache=state.target_cache.reserve(state.lengths))
        index = known[:, None] + jnp.arange(width, dtype=jnp.int32)
        ids = jnp.take_along_axis(state.tokens, jnp.minimum(index, state.tokens.shape[1] - 1), axis=1)
        state, hidden = self._read(params, state, ids, known, index)
        last = jnp.take_along_axis(hidden, (state.lengths - 1 - known)[:, None, None], axis=1)
        return state, self.target.head(params.target, last)

    def _read(self, params, state, ids, starts, positions):
        """Run the target on `ids`, write its K/V and the draft's context K/V at the same slots."""
        view = AttentionView(state.target_cache, starts, positions)
        output = self.target.forward(params.target, ids, view, self.proposer.taps)
        draft_cache = self.proposer.inject(params.draft, state.draft_cache, output.feature, starts, positions)
        return dataclasses.replace(state, target_cache=output.cache, draft_cache=draft_cache), output.hidden

    def _commit(self, state, tokens, num_accepted):
        """Write `num_accepted + 1` of `tokens` behind the clock, cut at the first eos and at the limit."""
        with jax.named_scope("commit"):
            index = jnp.arange(tokens.shape[1], dtype=jnp.int32)
            is_eos = (tokens[..., None] == state.eos_ids).any(-1)
            first_eos = jnp.where(is_eos, index, tokens.shape[1]).min(axis=1)
            room = state.limits - state.lengths
            count = jnp.minimum(jnp.minimum(num_accepted, first_eos) + 1, room)
            count = jnp.where(state.finished, 0, count)
            lengths = state.lengths + count
            hit_eos = first_eos < count
            finished = state.finished | hit_eos | (lengths >= state.limits)
            return dataclasses.replace(
                state,
                tokens=write_rows(state.tokens, tokens, state.lengths, axis=0),
                lengths=lengths,
                finished=finished,
                target_cache=state.target_cache if state.keep_cache else state.target_cache.release(finished),
            )
