"""Law: greedy output in float32 equals HF generate token for token, whatever the draft, block size, batch or cache."""

import pytest
import torch

from dflash_torchax import PagedCache, enabled, last_stats

from .tiny import ARCHITECTURES, ScriptedProposer, left_padded, random_draft, random_prompts, scripts, tiny_target

NEW_TOKENS = 24
BLOCK_SIZES = (1, 2, 4, 8, 16)
PROMPTS = random_prompts((9, 4, 13))


def is_fast(test, architecture, cache, block_size=8):
    """Whether a case is in the fast set: every architecture once, two of them through everything at block 8."""
    if architecture in ("llama", "gemma2"):
        return block_size == 8 or (test == "test_random_draft_is_exact" and block_size == 1 and cache == "static")
    return test == "test_random_draft_is_exact" and block_size == 8 and cache == "static"


# Pages smaller than a block, so that blocks straddle pages.
CACHES = {"static": "static", "paged": PagedCache(page_size=4)}


@pytest.fixture(params=CACHES)
def cache(request):
    return CACHES[request.param]


@pytest.fixture(scope="module", params=sorted(ARCHITECTURES))
def case(request):
    """(model, HF's output alone and batched, script)."""
    model = tiny_target(request.param)
    ids, mask = left_padded(PROMPTS)
    batched = model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)
    alone = model.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=NEW_TOKENS, do_sample=False)
    return model, alone, batched, scripts(model, PROMPTS, NEW_TOKENS)


def _check(model, draft, block_size, cache, alone, batched):
    ids, mask = left_padded(PROMPTS)
    with enabled(model, draft, block_size=block_size, cache=cache):
        assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False), batched)
        batch_stats = last_stats(model)
        assert torch.equal(model.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=NEW_TOKENS, do_sample=False), alone)
        return batch_stats, last_stats(model)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_random_draft_is_exact(case, cache, block_size):
    model, alone, batched, _ = case
    _check(model, random_draft(model, block_size=16), block_size, cache, alone, batched)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_perfect_draft_is_exact_and_accepts_every_slot(case, cache, block_size):
    model, alone, batched, script = case
    for stats in _check(model, ScriptedProposer(script, block_size), None, cache, alone, batched):
        assert stats.num_accepted_tokens == stats.num_drafted_tokens
        assert all(n == block_size - 1 for row in stats.accepted_per_step for n in row[:-1])


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_wrong_draft_is_exact_and_accepts_nothing(case, cache, block_size):
    model, alone, batched, script = case
    for stats in _check(model, ScriptedProposer(script, block_size, offset=1), None, cache, alone, batched):
        assert stats.num_accepted_tokens == 0
        assert stats.num_steps == (NEW_TOKENS - 1) * len(stats.accepted_per_step)


def test_plain_decoding_is_exact(case, cache):
    model, alone, batched, _ = case
    _check(model, None, None, cache, alone, batched)
