"""Law: one clock. After any accepts and rejects, both caches below it equal a recompute from scratch, and the positions
fed to target and draft are the committed lengths."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_torchax import bridge
from dflash_torchax.decode import Decoder, Params
from dflash_torchax.proposers import DFlash, Proposal
from dflash_torchax.state import check_invariants
from dflash_torchax.target import Target

from .tiny import VOCAB, random_draft, random_prompts, tiny_target

SLOTS, STEPS, BLOCK = 1024, 300, 4


class HalfRight(DFlash):
    """The real draft and its caches, but drafted tokens are a known continuation with random ones spoiled."""

    def propose(self, params, target_params, state):
        _, cache = self.denoise(params["draft"], target_params, state)
        key = jax.random.fold_in(jax.random.key(7), state.num_steps.sum())
        spoiled = jax.random.bernoulli(key, 0.3, (state.lengths.shape[0], self.block_size - 1))
        index = state.positions(self.block_size)[:, 1:]
        tokens = jnp.take_along_axis(params["script"], index, axis=1)
        return Proposal(jnp.where(spoiled, (tokens + 1) % VOCAB, tokens), cache)

    def inject(self, params, cache, feature, starts, positions):
        return super().inject(params["draft"], cache, feature, starts, positions)


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_caches_equal_a_recompute_over_random_steps(architecture):
    model = tiny_target(architecture, max_position_embeddings=SLOTS)
    target = Target(model, "cpu")
    proposer = HalfRight(random_draft(model, block_size=BLOCK), target)
    decoder = Decoder(target, proposer)
    prompts = random_prompts((5, 17, 11))
    prompt = np.zeros((3, 32), np.int32)
    for row, ids in enumerate(prompts):
        prompt[row, : len(ids)] = ids
    lengths = np.array([len(p) for p in prompts], np.int32)
    limits = np.full(3, SLOTS - BLOCK, np.int32)
    eos = np.full(8, -1, np.int32)
    target_params = bridge.params_of(model)

    # The script: the target's own continuation, from plain steps of a draft that is always wrong.
    script = jnp.full((3, SLOTS), -1)
    params = Params(target_params, {"draft": proposer.params, "script": script})
    prefill = jax.jit(decoder.prefill, static_argnames="slots")
    state = prefill(params, prompt, lengths, limits, eos, slots=SLOTS)
    script = jax.jit(decoder.decode_loop)(params, state).tokens
    params = dataclasses.replace(params, draft={"draft": proposer.params, "script": script})

    step, recompute = jax.jit(decoder.step), _recompute_of(decoder)
    accepted = set()
    for index in range(STEPS):
        before = state
        state = step(params, state)
        moved = np.asarray(state.lengths - before.lengths)
        accepted |= set(moved.tolist())
        if index % 25 == 0 or index == STEPS - 1:
            check_invariants(state, BLOCK)
            _compare_caches(state, recompute(params, state))
    assert not np.asarray(state.finished).any(), "all steps must be real ones"
    assert accepted >= {1, 2, 3, 4}, "the run must contain every acceptance length"

    # Positions: trace one step and read what both models were fed, as functions of the clock.
    _, positions = jax.jit(lambda p, s: _positions_of_step(decoder, p, s))(params, state)
    assert set(positions) == {"target", "draft", "draft (inject)"}
    expected = np.asarray(state.lengths)[:, None] - 1 + np.arange(BLOCK)
    for name, fed in positions.items():
        np.testing.assert_array_equal(expected, fed, err_msg=name)


def _recompute_of(decoder):
    """Both caches of a state, computed by one prefill over its committed tokens."""

    def recompute(params, state):
        fresh = decoder.prefill(params, state.tokens[:, : SLOTS - BLOCK], state.lengths, state.limits, state.eos_ids, slots=SLOTS)
        return fresh.target_cache, fresh.draft_cache

    return jax.jit(recompute)


def _compare_caches(state, recomputed):
    below = np.asarray(state.lengths) - 1
    for ours, fresh in zip((state.target_cache, state.draft_cache), recomputed, strict=True):
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(fresh), strict=True):
            for row, valid in enumerate(below):
                np.testing.assert_allclose(a[row, :, :valid], b[row, :, :valid], atol=2e-4, rtol=1e-3)


def _positions_of_step(decoder, params, state):
    """Run one step with the rotary embeddings of target and draft recording the position ids they get."""
    fed = {}
    modules = {"target": decoder.target.skeleton.model.rotary_emb, "draft": decoder.proposer.run.module.rotary_emb}
    for name, module in modules.items():

        def record(x, position_ids, name=name, original=module.forward):
            fed[name if name not in fed else f"{name} (inject)"] = bridge.jax_view(position_ids)
            return original(x, position_ids)

        module.forward = record
    try:
        return decoder.step(params, state), fed
    finally:
        for module in modules.values():
            del module.forward
