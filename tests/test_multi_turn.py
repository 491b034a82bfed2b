"""Laws: a returned cache saves reading and changes nothing; the prefill of a turn grows with its new tokens only."""

import pytest
import torch

from dflash_torchax import disable, enable, enabled, last_stats

from .smollm2 import needs_embedded
from .tiny import left_padded, random_draft, random_prompts, tiny_target

TURNS = random_prompts((9, 5, 1, 12, 3, 40), seed=8)


@pytest.fixture(scope="module")
def model():
    return tiny_target()


def say(model, ids, cache=None, **kwargs):
    kwargs.setdefault("attention_mask", torch.ones_like(ids))  # these targets say their pad token like any other word
    options = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True, **kwargs}
    return model.generate(ids, cache=cache, **options)


@pytest.mark.parametrize("drafted", [True, False])
def test_six_turns_equal_six_fresh_calls(model, drafted):
    ours = enable(tiny_target(), random_draft(model) if drafted else None)
    ids, cache, seen = torch.zeros(1, 0, dtype=torch.long), None, 0
    for turn in TURNS:
        ids = torch.cat([ids, torch.tensor([turn])], dim=1)
        output = say(ours, ids, cache)
        assert torch.equal(output.sequences, say(model, ids).sequences)
        assert last_stats(ours).num_prefill_tokens == ids.shape[1] - seen
        ids, cache = output.sequences, output.cache
        seen = ids.shape[1] - 1  # the last token was said, but not read


def test_a_diverging_prompt_reuses_the_common_prefix(model):
    prompt = torch.tensor(random_prompts((30,), seed=4))
    with enabled(tiny_target(), random_draft(model)) as ours:
        cache = say(ours, prompt).cache
        for keep in (0, 1, 17, 29):
            other = torch.cat([prompt[:, :keep], torch.tensor(random_prompts((8,), seed=keep + 50))], dim=1)
            same = int((other[0, : min(30, other.shape[1])] == prompt[0, : other.shape[1]]).long().cumprod(0).sum())
            assert torch.equal(say(ours, other, cache).sequences, say(model, other).sequences)
            assert last_stats(ours).num_prefill_tokens == other.shape[1] - same
        shorter = prompt[:, :12]
        assert torch.equal(say(ours, shorter, cache).sequences, say(model, shorter).sequences)
        assert last_stats(ours).num_prefill_tokens == 1, "one token is read for its logits"


def test_a_cache_serves_several_continuations(model):
    prompt = torch.tensor(random_prompts((14,), seed=4))
    with enabled(tiny_target(), random_draft(model)) as ours:
        cache = say(ours, prompt).cache
        for seed in (1, 2, 1):
            longer = torch.cat([prompt, torch.tensor(random_prompts((4,), seed=seed))], dim=1)
            assert torch.equal(say(ours, longer, cache).sequences, say(model, longer).sequences)


def test_batches_of_unequal_rows(model):
    prompts = random_prompts((9, 4, 13))
    with enabled(tiny_target(), random_draft(model)) as ours:
        ids, mask = left_padded(prompts)
        output = say(ours, ids, attention_mask=mask)
        new = [row + output.sequences[i, ids.shape[1] :].tolist() + extra
               for i, (row, extra) in enumerate(zip(prompts, random_prompts((3, 8, 1), seed=2), strict=True))]
        ids, mask = left_padded(new)
        longer = say(ours, ids, output.cache, attention_mask=mask)
        assert torch.equal(longer.sequences, say(model, ids, attention_mask=mask).sequences)
        assert last_stats(ours).num_prefill_tokens == (3 + 8 + 1) + 3


def test_other_ways_to_go_on(model):
    """After eos, with a longer cache than before, with a processor on the host, sampled."""
    prompt = torch.tensor(random_prompts((20,), seed=6))
    reference = say(model, prompt, max_new_tokens=10).sequences
    eos = int(reference[0, 24])
    with enabled(tiny_target(), random_draft(model)) as ours:
        ended = say(ours, prompt, eos_token_id=eos)
        longer = torch.cat([ended.sequences, torch.tensor(random_prompts((5,)))], dim=1)
        for options in ({"max_new_tokens": 300}, {"output_scores": True}, {"encoder_repetition_penalty": 1.5}):
            assert torch.equal(say(ours, longer, ended.cache, **options).sequences, say(model, longer, **options).sequences)


def test_the_wrong_cache_is_refused(model):
    with enabled(tiny_target(), random_draft(model)) as ours:
        cache = say(ours, torch.tensor(random_prompts((9,)))).cache
        ids, mask = left_padded(random_prompts((3, 4)))
        with pytest.raises(ValueError, match="cache: holds 1 rows"):
            say(ours, ids, cache, attention_mask=mask)
        ids = torch.tensor(random_prompts((12,)))
        for other in (enable(tiny_target(seed=5), random_draft(model)), enable(tiny_target())):
            with pytest.raises(ValueError, match="cache: it comes from another model"):
                say(other, ids, cache)
        with pytest.raises(TypeError, match="cache: it belongs to an enabled model"):
            model.generate(ids, cache=cache, max_new_tokens=3, do_sample=False)


@needs_embedded
@pytest.mark.slow
def test_six_turns_on_smollm2(smollm2):
    model, draft, tokenizer = smollm2
    questions = ["Hi!", "What is 12 * 7?", "And 3 more?", "Name a colour.", "Another one?", "Thanks, bye."]
    messages, cache, reads = [], None, []
    enable(model, draft, max_length=1000)
    for question in questions:
        messages.append({"role": "user", "content": question})
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True).input_ids
        expected = type(model).generate(model, ids, max_new_tokens=24, do_sample=False)
        output = model.generate(ids, max_new_tokens=24, do_sample=False, cache=cache, return_dict_in_generate=True)
        reads.append((output.stats.num_prefill_tokens, ids.shape[1]))
        assert torch.equal(output.sequences, expected)
        cache = output.cache
        reply = tokenizer.decode(output.sequences[0, ids.shape[1] :], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": reply})
    disable(model)
    assert all(read < total / 2 for read, total in reads[2:]), reads
