"""Law: with any draft and either way of proposing, what is sampled has exactly the target's distribution."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from dflash_torchax import enabled, engine, last_stats, sampling
from dflash_torchax.proposers import propose_from

from .tiny import random_draft, tiny_target

VOCAB = 6
PROMPT = [1, 4, 2, 5]
SAMPLES, ROWS = 20_000, 2_000
SETTINGS = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.15},
}


@pytest.fixture(scope="module")
def model():
    return tiny_target(vocab_size=VOCAB)


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch):
    """Thousands of rows of seven tokens: no need for 256 slots each."""
    monkeypatch.setattr(engine, "_MIN_SLOTS", 16)
    monkeypatch.setattr(engine, "_MIN_PROMPT_BUCKET", 4)


def neutral(**kwargs):
    return {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0, "pad_token_id": 0, **kwargs}


def log_probs_after(model, prefixes, setting=None):
    """float64 [n, vocab]: HF's logits (with HF's own warpers where a setting is given), normalised."""
    ids = torch.tensor([PROMPT + list(p) for p in prefixes])
    with torch.no_grad():
        logits = model(ids).logits[:, -1].double()
    if setting is not None:
        config = GenerationConfig(**neutral(**setting))
        config._eos_token_tensor = config._pad_token_tensor = None
        logits = model._get_logits_processor(config, len(PROMPT), None, None, [], "cpu", {})(ids, logits)
    return torch.log_softmax(logits, -1).numpy()


def exact_distribution(model, setting):
    """float64 [vocab ** 3]: probability of each three-token continuation."""
    words = range(VOCAB)
    first = np.exp(log_probs_after(model, [()], setting))[0]
    second = np.exp(log_probs_after(model, [(a,) for a in words], setting))
    third = np.exp(log_probs_after(model, list(itertools.product(words, words)), setting)).reshape(VOCAB, VOCAB, VOCAB)
    return (first[:, None, None] * second[:, :, None] * third).reshape(-1)


class Table:
    """A draft that looks its logits up: the target's exact marginals ("perfect"), or their negatives ("wrong")."""

    block_size, taps = 3, ()

    def __init__(self, model, sign):
        words = range(VOCAB)
        second = log_probs_after(model, [(a,) for a in words])
        third = log_probs_after(model, list(itertools.product(words, words))).reshape(VOCAB, VOCAB, VOCAB)
        marginal = np.log(np.einsum("ab,abc->ac", np.exp(second), np.exp(third)))
        self.params = tuple(jnp.asarray(sign * t, jnp.float32) for t in (second, marginal, third))

    def create_cache(self, batch_size, slots):
        return ()

    def inject(self, params, cache, feature, starts, positions):
        return cache

    def propose(self, params, target_params, state):
        second, marginal, third = params
        one, two = state.tokens[:, len(PROMPT)], state.tokens[:, len(PROMPT) + 1]
        after_one = jnp.stack([second[one], marginal[one]], axis=1)
        after_two = jnp.stack([third[one, two], third[one, two]], axis=1)
        logits = jnp.where((state.lengths == len(PROMPT) + 1)[:, None, None], after_one, after_two)
        return propose_from(logits, state, state.draft_cache)


def draft_of(model, kind):
    return {"random": lambda: random_draft(model, block_size=3), "few words": lambda: few_words(model),
            "perfect": lambda: Table(model, 1.0), "wrong": lambda: Table(model, -1.0)}[kind]()


def few_words(model):
    """A draft that guesses among some of the target's words only."""
    draft = random_draft(model, block_size=3)
    draft.vocabulary = torch.tensor([0, 2, 3])
    return draft


def sampled_counts(model, setting):
    torch.manual_seed(0)
    counts = np.zeros(VOCAB**3)
    ids = torch.tensor([PROMPT]).expand(ROWS, -1)
    for _ in range(SAMPLES // ROWS):
        new = model.generate(ids, max_new_tokens=3, **neutral(**setting))[:, len(PROMPT) :].numpy()
        counts += np.bincount(new @ [VOCAB**2, VOCAB, 1], minlength=VOCAB**3)
    return counts


def deviation(counts, probs):
    """Chi-square against the exact distribution, in standard deviations of its own distribution."""
    expected = probs * counts.sum()
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] < 1:  # next to impossible continuations: they may not turn up more than that
        assert counts[-1] <= 8
        counts, expected = counts[:-1], expected[:-1]
    freedom = len(counts) - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom)


def _slow_unless(setting, kind, mode):
    fast = {("temperature", "random", "greedy"), ("temperature", "random", "probabilistic"), ("top_p", "perfect", "probabilistic"),
            ("temperature", "few words", "probabilistic"), ("top_k", "wrong", "probabilistic"), ("min_p", "perfect", "greedy")}
    return [] if (setting, kind, mode) in fast else pytest.mark.slow


CASES = [pytest.param(*case, marks=_slow_unless(*case))
         for case in itertools.product(SETTINGS, ("random", "few words", "perfect", "wrong"), ("greedy", "probabilistic"))]


@pytest.mark.parametrize(("setting", "kind", "mode"), CASES)
def test_samples_have_the_targets_distribution(model, setting, kind, mode):
    with enabled(model, draft_of(model, kind), draft_sampling=mode, max_length=16):
        counts = sampled_counts(model, SETTINGS[setting])
        stats = last_stats(model)
    assert deviation(counts, exact_distribution(model, SETTINGS[setting])) < 4.5
    if kind == "perfect":
        assert stats.acceptance_rate > 0.3
    assert stats.num_drafted_tokens > 0


@pytest.mark.parametrize("mode", ["greedy", "probabilistic"])
def test_the_test_notices_a_reused_key(model, mode, monkeypatch):
    monkeypatch.setattr(sampling, "_uniform", _same_for_all_positions)
    with enabled(model, Table(model, 1.0), draft_sampling=mode, max_length=16):
        counts = sampled_counts(model, SETTINGS["temperature"])
    assert deviation(counts, exact_distribution(model, SETTINGS["temperature"])) > 20


def _same_for_all_positions(rules, positions, role):
    rows = jax.vmap(lambda row: jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(rules.key), row)))(
        jnp.arange(positions.shape[0]))
    return jnp.broadcast_to(rows[:, None], positions.shape)


@pytest.mark.parametrize("mode", ["greedy", "probabilistic"])
def test_a_seed_reproduces(model, mode):
    ids = torch.tensor([PROMPT, PROMPT])
    with enabled(model, random_draft(model), draft_sampling=mode):
        draw = lambda **kwargs: model.generate(ids, max_new_tokens=30, **neutral(**kwargs))
        torch.manual_seed(3)
        first, other = draw(), draw()
        torch.manual_seed(3)
        assert torch.equal(draw(), first)
        seeded = [draw(generator=torch.Generator().manual_seed(5)) for _ in range(2)]
    assert torch.equal(*seeded)
    assert not torch.equal(first, other)
    assert not torch.equal(first[0], first[1]), "rows have numbers of their own"


def test_greedy_proposals_do_not_change_the_sample(model):
    """One number per row and position: the text is the same with any draft, block size, and without one."""
    outputs = []
    for draft, block_size in ((None, None), (random_draft(model), 8), (random_draft(model), 3), (Table(model, -1.0), None)):
        with enabled(model, draft, block_size=block_size, draft_sampling="greedy"):
            torch.manual_seed(1)
            outputs.append(model.generate(torch.tensor([PROMPT] * 3), max_new_tokens=25, **neutral(temperature=1.5)))
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])


@pytest.mark.parametrize("setting", [{"typical_p": 0.6}, {"epsilon_cutoff": 0.1}, {"eta_cutoff": 0.2}, {"top_p": 0.5, "top_k": 4}])
def test_only_words_that_hf_keeps(model, setting):
    allowed = exact_distribution(model, setting) > 0
    assert 1 < allowed.sum() < allowed.size
    with enabled(model, Table(model, 1.0), max_length=16):
        counts = sampled_counts(model, setting)
    assert not counts[~allowed].any()
    assert deviation(counts, exact_distribution(model, setting)) < 4.5


def test_host_path_samples_what_hf_samples(model):
    """The host path draws from torch's generator column by column, as HF does: the same seed gives the same text."""
    ids = torch.tensor([PROMPT, PROMPT])
    options = neutral(temperature=0.8, max_new_tokens=20, output_scores=True, return_dict_in_generate=True)
    torch.manual_seed(2)
    expected = model.generate(ids, **options)
    with enabled(model, random_draft(model)):
        torch.manual_seed(2)
        assert torch.equal(model.generate(ids, **options).sequences, expected.sequences)


def test_num_return_sequences(model):
    with enabled(model, random_draft(model)):
        output = model.generate(torch.tensor([PROMPT]), max_new_tokens=12, num_return_sequences=4, **neutral())
    assert output.shape[0] == 4
    assert len({tuple(row) for row in output.tolist()}) > 1


def test_categorical_never_takes_weight_zero():
    weights = jnp.array([[0.0, 0.0, 1.0, 0.0], [0.0, 1e-30, 0.0, 0.0], [0.5, 0.0, 0.5, 0.0]])
    for point in (0.0, 0.5, 1 - 2**-24):
        chosen = np.asarray(sampling.categorical(weights, jnp.full((3,), point)))
        assert chosen.tolist()[:2] == [2, 1]
        assert chosen[2] in (0, 2)
    big = jax.random.uniform(jax.random.key(0), (1, 1000)).at[0, 500:].set(0)
    draws = sampling.categorical(jnp.broadcast_to(big, (4000, 1000)), jax.random.uniform(jax.random.key(1), (4000,)))
    assert int(draws.max()) < 500
    assert len(np.unique(draws)) > 400
