"""Laws of a draft that guesses among some of the target's words: same text, the whole draft's choice among those words."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh

from dflash_torchax import enabled, last_stats, load_draft
from dflash_torchax.cli.info import describe
from dflash_torchax.config import VOCABULARY_FILE
from dflash_torchax.engine import Engine
from dflash_torchax.proposers import propose_from
from dflash_torchax.training.export import export_dflash

from .test_lowering import request_of
from .tiny import VOCAB, ScriptedProposer, left_padded, random_draft, random_prompts, scripts, tiny_target

WORDS = torch.tensor([1, 6, 7, 20, 33, 34, 60, 61, 80, 96])


def cut_draft(model, words=WORDS, **kwargs):
    draft = random_draft(model, **kwargs)
    draft.vocabulary = words
    return draft


def numpy_params(draft):
    return {name: tensor.detach().numpy() for name, tensor in draft.named_parameters()}


def proposal(engine, request):
    state = engine.start(request)
    return np.asarray(jax.jit(engine.decoder.proposer.propose)(engine.params.draft, engine.params.target, state).tokens)


@pytest.mark.parametrize(("name", "tied"), [("llama", True), ("llama", False), ("gemma2", True), ("granite", False)])
def test_proposes_the_whole_drafts_best_among_its_words(name, tied):
    model = tiny_target(name, tie_word_embeddings=tied)
    whole, cut = Engine(model, random_draft(model)), Engine(model, cut_draft(model))
    request = request_of((9, 4))

    def best(params, state):
        hidden, _ = whole.decoder.proposer.denoise(params.draft, params.target, state)
        logits = whole.decoder.proposer.logits(params.draft, params.target, hidden[:, 1:])
        return jnp.asarray(WORDS.numpy())[logits[..., WORDS.numpy()].argmax(-1)]

    np.testing.assert_array_equal(proposal(cut, request), jax.jit(best)(whole.params, whole.start(request)))


@pytest.mark.parametrize("words", [WORDS, torch.arange(VOCAB), torch.tensor([3])], ids=["some", "all", "one"])
@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}], ids=["plain", "processors"])
def test_text_is_hf_s(words, options):
    model = tiny_target()
    ids, mask = left_padded(random_prompts((3, 9, 1)))
    ask = lambda: model.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False, **options)
    expected = ask()
    with enabled(model, cut_draft(model, words)):
        assert torch.equal(ask(), expected)
        stats = last_stats(model)
    with enabled(model, random_draft(model)):
        assert torch.equal(ask(), expected)
        whole = last_stats(model)
    if len(words) == VOCAB:
        assert stats.accepted_per_step == whole.accepted_per_step


class Logits(ScriptedProposer):
    """The script as logits over some words only: perfect where it holds the word, and at `offset` always wrong."""

    words = None

    def propose(self, params, target_params, state):
        wanted = super().propose(params, target_params, state)
        logits = 9.0 * (jnp.asarray(self.words) == wanted.tokens[..., None])
        return propose_from(logits, state, wanted.cache, jnp.asarray(self.words), VOCAB)


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3}], ids=["plain", "processors"])
@pytest.mark.parametrize("kind", ["perfect", "one word missing", "always wrong"])
def test_acceptance(kind, options):
    model, prompts = tiny_target(), random_prompts((5,))
    script = scripts(model, prompts, 24, **options)
    words = np.unique(script[0, 5:])
    draft = Logits(script, 8, offset=int(kind == "always wrong"))
    draft.words = {"perfect": words, "one word missing": words[words != script[0, 7]], "always wrong": np.arange(VOCAB)}[kind]
    with enabled(model, draft):
        out = model.generate(torch.tensor(prompts), max_new_tokens=24, do_sample=False, **options)
        stats = last_stats(model)
    assert out[0].tolist() == script[0].tolist()
    accepted = stats.accepted_per_step[0]
    if kind == "perfect":
        assert accepted == [7, 7, 6], "every slot but the last token, which is a bonus"
    elif kind == "always wrong":
        assert not any(accepted)
    else:
        assert accepted[0] == 1, "up to the word that is not there"


def test_on_a_mesh():
    model = tiny_target()
    ids = torch.tensor(random_prompts((7,)))
    expected = model.generate(ids, max_new_tokens=16, do_sample=False)
    with enabled(model, cut_draft(model), mesh=Mesh(np.array(jax.devices()[:1]), ("model",))):
        assert torch.equal(model.generate(ids, max_new_tokens=16, do_sample=False), expected)


def test_a_checkpoint_keeps_the_words_in_a_file_of_their_own(tmp_path):
    model = tiny_target()
    draft = cut_draft(model)
    export_dflash(draft, numpy_params(draft), tmp_path, dtype=torch.float32)
    loaded = load_draft(tmp_path)
    assert torch.equal(loaded.vocabulary, WORDS)
    assert describe(tmp_path, "CHECKPOINT")["draft_vocabulary"] == "10 ids of its own"
    assert "vocabulary" not in loaded.state_dict(), "z-lab's and vLLM's readers find the tensors they know"
    assert not any("vocabulary" in key for key in json.loads((tmp_path / "config.json").read_text()) if key != "vocab_size")
    request = request_of((9,))
    np.testing.assert_array_equal(proposal(Engine(model, loaded), request), proposal(Engine(model, draft), request))
    whole = random_draft(model)
    export_dflash(whole, numpy_params(whole), tmp_path)
    assert load_draft(tmp_path).vocabulary is None, "the words of the draft that was there before are gone"


@pytest.mark.parametrize("content", ["[3, 2]", "[2, 2]", "[-1, 2]", "[2, 97]", "[]", "{}", "[1.0]", "[true]"])
def test_a_wrong_file_is_refused(tmp_path, content):
    draft = random_draft(tiny_target())
    export_dflash(draft, numpy_params(draft), tmp_path)
    (tmp_path / VOCABULARY_FILE).write_text(content)
    with pytest.raises(ValueError, match="draft_vocabulary.json: .*ascending order"):
        load_draft(tmp_path)
    about = describe(tmp_path, "CHECKPOINT")
    assert not about["supported"]
    assert "ascending order" in about["reason"]
