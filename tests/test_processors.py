"""Laws: each processor, criterion and output equals HF's, with any draft, alone or in a batch, streamed or not."""

import functools

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
)

from dflash_torchax import enable, last_stats

from .test_stopping import Recorder
from .tiny import VOCAB, ScriptedProposer, left_padded, random_draft, random_prompts, scripts, tiny_target

PROMPTS = random_prompts((9, 4, 13))
NEW_TOKENS = 20


class Shout(LogitsProcessor):
    """A user's processor that depends on the prefix and counts its calls: it must see each column once, in order."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids.shape[1])
        return scores + (input_ids[:, -1:] == torch.arange(scores.shape[-1])) * 2.0 - (input_ids.sum(1, keepdim=True) % 3)


class StopAt(StoppingCriteria):
    """Ends a row on ids divisible by 7."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] % 7 == 0


ON_DEVICE = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram_size 1": {"no_repeat_ngram_size": 1},
    "no_repeat_ngram_size 2": {"no_repeat_ngram_size": 2},
    "no_repeat_ngram_size 3": {"no_repeat_ngram_size": 3},
    "bad_words_ids": {"bad_words_ids": [[3], [4, 9], [35], [8, 9, 54]]},
    "sequence_bias": {"sequence_bias": [[[35], -6.0], [[9, 35], 4.0], [[22], 2.5]]},
    "suppress_tokens": {"suppress_tokens": list(range(20, 60))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(0, 90, 2))},
    "min_new_tokens": {"min_new_tokens": 7, "eos_token_id": list(range(0, 97, 3))},
    "min_length": {"min_length": 18, "eos_token_id": list(range(0, 97, 3))},
    "forced_eos_token_id": {"forced_eos_token_id": 3, "eos_token_id": 3},
    "exponential_decay": {"exponential_decay_length_penalty": (3, 1.4), "eos_token_id": 3},
    "remove_invalid, renormalize": {"remove_invalid_values": True, "renormalize_logits": True},
    "several": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "suppress_tokens": [35], "min_new_tokens": 3,
                "eos_token_id": 9},
}
ON_HOST = {
    "user processor": lambda: {"logits_processor": LogitsProcessorList([Shout()])},
    "prefix_allowed_tokens_fn": lambda: {
        "prefix_allowed_tokens_fn": lambda row, ids: [(int(ids[-1]) * 3 + row + k) % VOCAB for k in range(9)]},
    "encoder_no_repeat_ngram_size": lambda: {"encoder_no_repeat_ngram_size": 1},
    "encoder_repetition_penalty": lambda: {"encoder_repetition_penalty": 1.8},
}
STOPPING = {
    "criterion": lambda: {"stopping_criteria": StoppingCriteriaList([StopAt()])},
    "criterion and eos": lambda: {"stopping_criteria": StoppingCriteriaList([StopAt()]), "eos_token_id": [5, 9, 54]},
    "criterion on the host path": lambda: {"stopping_criteria": StoppingCriteriaList([StopAt()]),
                                           "logits_processor": LogitsProcessorList([Shout()])},
}


@functools.cache
def reference():
    return tiny_target()


@functools.cache
def drafted(kind):
    """A model enabled with a draft of some kind; compiled once."""
    script = scripts(reference(), PROMPTS, NEW_TOKENS)
    draft = {"random": lambda m: random_draft(m), "perfect": lambda m: ScriptedProposer(script, 8),
             "wrong": lambda m: ScriptedProposer(script, 8, 1), "plain": lambda m: None}[kind]
    model = tiny_target()
    return enable(model, draft(model), max_length=64)


def both(kind, rows, make, streamed=False, **fixed):
    """(ours, HF's) outputs of one call; `make()` gives fresh arguments to each."""
    ids, mask = left_padded(PROMPTS[:rows])
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, **fixed}
    streamer = {"streamer": Recorder()} if streamed else {}
    ours = drafted(kind).generate(ids, attention_mask=mask, **options, **make(), **streamer)
    return ours, reference().generate(ids, attention_mask=mask, **options, **make()), streamer.get("streamer")


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ON_DEVICE)
def test_processors_on_the_device(name, rows):
    for kind in ("random", "perfect"):
        ours, theirs, streamer = both(kind, rows, lambda: ON_DEVICE[name], streamed=kind == "perfect")
        assert torch.equal(ours, theirs), kind
    assert torch.equal(torch.stack(streamer.puts[1:], dim=1), ours[:, streamer.puts[0].shape[1] :])


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ON_HOST)
@pytest.mark.parametrize("kind", ["random", "perfect", "wrong", "plain"])
def test_processors_on_the_host(kind, name, rows):
    ours, theirs, streamer = both(kind, rows, ON_HOST[name], streamed=True)
    assert torch.equal(ours, theirs)
    assert torch.equal(torch.stack(streamer.puts[1:], dim=1), ours[:, streamer.puts[0].shape[1] :])


@pytest.mark.parametrize("ignored", [None, 2, torch.tensor([4, 9, 0]), torch.tensor([0, 0, 12])])
def test_repetition_penalty_as_an_object_counts_what_hf_counts(ignored):
    """HF's own keyword leaves the padding out; an object may count it, here as a word that is also eos."""
    make = lambda: {"logits_processor": LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3, ignored)]), "eos_token_id": 0}
    ours, theirs, _ = both("random", 3, make)
    assert torch.equal(ours, theirs)


def test_a_users_processor_sees_each_column_once():
    processor = Shout()
    ours, _, _ = both("perfect", 3, lambda: {"logits_processor": LogitsProcessorList([processor])})
    width = max(map(len, PROMPTS))
    columns = list(range(width, ours.shape[1]))
    assert processor.seen == columns + columns, "once per column by us, once by HF"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", STOPPING)
@pytest.mark.parametrize("kind", ["random", "perfect", "wrong"])
def test_stopping_criteria(kind, name, rows, streamed):
    ours, theirs, _ = both(kind, rows, STOPPING[name], streamed)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", ["random", "perfect"])
def test_max_time_of_zero_stops_after_the_first_token(kind):
    ours, theirs, _ = both(kind, 1, lambda: {"max_time": 0.0})
    assert torch.equal(ours, theirs)
    assert ours.shape[1] == len(PROMPTS[0]) + 1


@pytest.mark.parametrize("kind", ["random", "perfect", "wrong"])
@pytest.mark.parametrize("rows", [1, 3])
def test_scores_and_logits(kind, rows):
    """Also for rows that ended: HF goes on feeding them the pad token."""
    arguments = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True, "repetition_penalty": 1.2,
                 "eos_token_id": [9, 54]}
    ours, theirs, _ = both(kind, rows, lambda: arguments)
    assert torch.equal(ours.sequences, theirs.sequences)
    for field in ("scores", "logits"):
        mine, hf = getattr(ours, field), getattr(theirs, field)
        assert len(mine) == len(hf)
        for a, b in zip(mine, hf, strict=True):
            assert a.shape == b.shape == (rows, VOCAB)
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    score = lambda output: reference().compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
    torch.testing.assert_close(score(ours), score(theirs), atol=1e-4, rtol=1e-4)
    assert ours.stats == last_stats(drafted(kind))


@pytest.mark.parametrize("field", ["output_scores", "output_logits"])
def test_only_what_was_asked_for(field):
    ours, _, _ = both("random", 1, lambda: {field: True, "return_dict_in_generate": True})
    assert (ours.scores is not None) == (field == "output_scores")
    assert (ours.logits is not None) == (field == "output_logits")


def test_other_values_compile_nothing():
    from .test_lowering import counted_compiles

    both("random", 1, lambda: {"repetition_penalty": 1.7, "suppress_tokens": [5]})
    with counted_compiles() as compiles:
        drafted("random").generate(torch.tensor(PROMPTS[:1]), max_new_tokens=9, do_sample=False, repetition_penalty=1.1,
                                   suppress_tokens=[7, 8])
    assert compiles == []
