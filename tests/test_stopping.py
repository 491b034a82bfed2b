"""Laws of ending: eos at any offset of a block, limits, streaming order, no state left between calls."""

import dataclasses
import threading

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from dflash_torchax import disable, enable, enabled, last_stats, stream_blocks

from .tiny import MASK_ID, ScriptedProposer, left_padded, random_draft, random_prompts, scripts, tiny_target

BLOCK = 8
PROMPTS = random_prompts((9, 4, 13))
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def model():
    return tiny_target()


@pytest.fixture(scope="module")
def script(model):
    return scripts(model, PROMPTS, NEW_TOKENS)


@pytest.fixture(scope="module")
def drafts(model, script):
    """Each kind of draft, enabled on a model of its own, so that programs are compiled once for the module."""
    kinds = {"random": random_draft(model), "perfect": ScriptedProposer(script, BLOCK), "wrong": ScriptedProposer(script, BLOCK, 1)}
    return {kind: enable(tiny_target(), draft, max_length=64) for kind, draft in kinds.items()}


def greedy(model, ids, **kwargs):
    kwargs = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, **kwargs}
    return model.generate(ids, **kwargs)


@pytest.mark.parametrize("kind", ["random", "perfect", "wrong"])
def test_eos_at_every_offset(model, drafts, script, kind):
    ids = torch.tensor(PROMPTS[:1])
    new = script[0, len(PROMPTS[0]) :]
    for eos in dict.fromkeys(new[: 2 * BLOCK].tolist()):  # the first one ends on the very first token
        for ends in (eos, [eos, 96], [95, eos]):
            assert torch.equal(greedy(drafts[kind], ids, eos_token_id=ends), greedy(model, ids, eos_token_id=ends))


@pytest.mark.parametrize("kind", ["random", "perfect", "wrong"])
def test_one_row_ends_early_in_a_batch(model, drafts, script, kind):
    ids, mask = left_padded(PROMPTS)
    for offset in (0, 1, 5, BLOCK, 11):
        eos = int(script[1, len(PROMPTS[1]) + offset])
        expected = greedy(model, ids, attention_mask=mask, eos_token_id=eos)
        assert torch.equal(greedy(drafts[kind], ids, attention_mask=mask, eos_token_id=eos), expected)


@pytest.mark.parametrize("kind", ["random", "perfect", "wrong"])
@pytest.mark.parametrize("new_tokens", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1])
def test_max_new_tokens(model, drafts, kind, new_tokens):
    ids, mask = left_padded(PROMPTS)
    expected = greedy(model, ids, attention_mask=mask, max_new_tokens=new_tokens)
    assert torch.equal(greedy(drafts[kind], ids, attention_mask=mask, max_new_tokens=new_tokens), expected)


def test_max_length_and_generation_config(model, drafts):
    ids, mask = left_padded(PROMPTS)
    for options in ({"max_length": 20}, {"generation_config": GenerationConfig(max_new_tokens=6, do_sample=False, pad_token_id=0)}):
        expected = model.generate(ids, attention_mask=mask, **options)
        assert torch.equal(drafts["random"].generate(ids, attention_mask=mask, **options), expected)


def test_prompt_of_one_token(model, drafts):
    ids = torch.tensor([[11]])
    assert torch.equal(greedy(drafts["random"], ids), greedy(model, ids))


def test_mask_token_emitted_by_the_target_is_kept(script):
    """The id that fills the masked slots is an ordinary word to the target."""
    model = tiny_target()
    new = script[0, len(PROMPTS[0]) :].tolist()
    draft = random_draft(model)
    object.__setattr__(draft.config, "mask_token_id", new[3])
    ids = torch.tensor(PROMPTS[:1])
    expected = greedy(model, ids)
    assert new[3] != MASK_ID
    assert new[3] in expected[0, len(PROMPTS[0]) :]
    with enabled(model, draft):
        assert torch.equal(greedy(model, ids), expected)
        mask_is_eos = greedy(model, ids, eos_token_id=new[3])
    assert torch.equal(mask_is_eos, greedy(model, ids, eos_token_id=new[3]))


def test_position_limit_inside_a_block():
    """The last block may reach past the model's positions; the output stops exactly at them."""
    model = tiny_target(max_position_embeddings=32)
    ids = torch.tensor(PROMPTS[:1])
    expected = greedy(model, ids, max_new_tokens=32 - len(PROMPTS[0]))
    script = scripts(model, PROMPTS[:1], 32 - len(PROMPTS[0]))
    for draft in (random_draft(model), ScriptedProposer(script, BLOCK), ScriptedProposer(script, BLOCK, 1)):
        with enabled(model, draft):
            assert torch.equal(greedy(model, ids, max_new_tokens=32 - len(PROMPTS[0])), expected)


def test_second_call_equals_a_fresh_model(model, drafts):
    first, second = torch.tensor(PROMPTS[2:]), torch.tensor(PROMPTS[:1])
    greedy(drafts["random"], first)
    stats = last_stats(drafts["random"])
    assert torch.equal(greedy(drafts["random"], second), greedy(model, second))
    greedy(drafts["random"], first)
    assert last_stats(drafts["random"]) == stats


def test_two_threads_are_exact(model):
    """Also while both are compiling: tracing swaps attributes of one shared module."""
    shared = enable(tiny_target(), random_draft(model))
    prompts = [torch.tensor(p).unsqueeze(0) for p in random_prompts((5, 40, 9, 70), seed=3)]
    expected = [greedy(model, ids) for ids in prompts]
    results, errors = [None] * len(prompts), []

    def work(index):
        try:
            for _ in range(3):
                results[index] = greedy(shared, prompts[index])
        except Exception as error:  # noqa: BLE001 (reported by the assertion below)
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


class Recorder:
    """A streamer that keeps what it is given."""

    def __init__(self):
        self.puts, self.ended = [], 0

    def put(self, value):
        assert not self.ended
        self.puts.append(value.clone())

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("kind", ["random", "perfect", "wrong"])
@pytest.mark.parametrize("rows", [1, 3])
def test_streamer_gets_what_hf_gives_it(model, drafts, script, kind, rows):
    ids, mask = left_padded(PROMPTS[:rows])
    eos = int(script[0, len(PROMPTS[0]) + 12])
    ours, theirs = Recorder(), Recorder()
    output = greedy(drafts[kind], ids, attention_mask=mask, eos_token_id=eos, streamer=ours)
    if rows == 1:
        greedy(model, ids, attention_mask=mask, eos_token_id=eos, streamer=theirs)
        assert len(ours.puts) == len(theirs.puts)
        assert all(torch.equal(a, b) for a, b in zip(ours.puts, theirs.puts, strict=True))
    assert torch.equal(ours.puts[0], ids)
    assert torch.equal(torch.stack(ours.puts[1:], dim=1), output[:, ids.shape[1] :])
    assert ours.ended == 1


def test_blocks_add_up_to_the_output_where_a_criterion_ends_a_row(drafts, script, monkeypatch):
    """The first row's draft is perfect, the others' wrong: its criterion is asked long after its block was committed."""
    model, ahead = drafts["perfect"], script.copy()
    ahead[1:] += 1
    engine = model.generate.engine
    monkeypatch.setattr(engine, "params", dataclasses.replace(engine.params, draft=jnp.asarray(ahead)))
    ids, mask = left_padded(PROMPTS)
    end = int(script[0, len(PROMPTS[0]) + 4])
    streamer = Recorder()
    options = {"attention_mask": mask, "max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0,
               "stopping_criteria": [lambda ids, scores: ids[:, -1] == end], "eos_token_id": 96}
    output = model.generate(ids, **options)
    said = [[] for _ in PROMPTS]
    for new, accepted in stream_blocks(model, ids, streamer=streamer, **options):
        assert all(0 <= count <= len(row) for row, count in zip(new, accepted, strict=True))
        for row, tokens in zip(said, new, strict=True):
            row += tokens
    width = output.shape[1] - ids.shape[1]
    assert [row + [0] * (width - len(row)) for row in said] == output[:, ids.shape[1] :].tolist()
    assert len(said[0]) == 5
    assert streamer.ended == 1


def test_stats_add_up(drafts):
    ids, mask = left_padded(PROMPTS)
    greedy(drafts["perfect"], ids, attention_mask=mask)
    stats = last_stats(drafts["perfect"])
    assert stats.num_steps == sum(map(len, stats.accepted_per_step)) == 9
    assert stats.num_accepted_tokens + stats.num_steps == 3 * (NEW_TOKENS - 1)
    assert stats.acceptance_length == pytest.approx(23 / 3)
    assert stats.acceptance_rate == 1.0
    assert len(stats.accepted_by_position) == BLOCK - 1
    assert sum(stats.accepted_by_position) + 1 == pytest.approx(stats.acceptance_length)
    assert np.all(np.diff(stats.accepted_by_position) <= 0)


def test_disable_gives_hf_back(model):
    copy = tiny_target()
    enable(copy, random_draft(copy))
    enable(copy)
    assert "generate" in copy.__dict__
    disable(copy)
    assert "generate" not in copy.__dict__
    assert copy.config._attn_implementation == model.config._attn_implementation
