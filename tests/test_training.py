"""Laws of training: the gradient is PyTorch's, a killed run resumes to the same numbers, training makes a draft that drafts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from dflash_torchax import bridge, enabled, last_stats, load_draft
from dflash_torchax.target import Target
from dflash_torchax.training import corpus, vocabulary
from dflash_torchax.training.blocks import DFlashLearner
from dflash_torchax.training.dataset import Dataset
from dflash_torchax.training.export import export_dflash
from dflash_torchax.training.initial import deepened, new_dflash
from dflash_torchax.training.learner import Frozen, Recipe, identity_of, sample_anchors, tensors_of
from dflash_torchax.training.losses import LossWeights
from dflash_torchax.training.taps import ShardFeatures, TapReader, compute_missing
from dflash_torchax.training.trainer import BEST, Schedule, Trainer, trained_params

from .tiny import MASK_ID, assert_step_is_torch_s, left_padded, random_draft, random_prompts, tiny_target
from .training_cases import LAYERS, training_batch

BLOCK = 4
LOSSES = LossWeights(tokens=1.0, distillation=0.5, regression=0.25)


def _torch_dflash_loss(draft, model, batch, anchors, gamma, hidden_size):
    """The same loss in plain PyTorch, one block at a time, with a textbook attention."""
    numerator, denominator = dict.fromkeys(("tokens", "distillation", "regression"), 0.0), 0.0
    features = torch.from_numpy(np.array(batch.features))
    ids = torch.from_numpy(np.array(batch.ids)).long()
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    for row, row_anchors in enumerate(anchors):
        taps, final = features[row, :, :-hidden_size], features[row, :, -hidden_size:]
        for anchor in row_anchors.tolist():
            context = draft.inject_context(taps[None, :anchor], torch.arange(anchor)[None])

            def attend(module, query, key, value):
                keys = torch.cat([context[module.layer_idx][0], key], dim=2).repeat_interleave(2, dim=1)
                values = torch.cat([context[module.layer_idx][1], value], dim=2).repeat_interleave(2, dim=1)
                positions = torch.arange(anchor + BLOCK)
                behind = positions[anchor:, None] - positions
                seen = behind >= 0 if module.is_causal else torch.ones_like(behind, dtype=torch.bool)
                if module.sliding_window is not None:
                    seen &= behind.abs() < module.sliding_window
                weights = (query @ keys.transpose(2, 3) * module.head_dim**-0.5).masked_fill(~seen, -torch.inf).softmax(-1)
                return (weights @ values).transpose(1, 2)

            block = torch.tensor([[ids[row, anchor]] + [draft.config.mask_token_id] * (BLOCK - 1)])
            hidden = draft.denoise(embedding[block], anchor + torch.arange(BLOCK)[None], attend)[0, 1:]
            for k in range(1, BLOCK):
                if anchor + k < int(batch.lengths[row]):
                    weight = float(np.exp(-(k - 1) / gamma))
                    log_q = (hidden[k - 1] @ head.T).log_softmax(-1)
                    goal = final[anchor + k - 1]
                    numerator["tokens"] -= weight * log_q[ids[row, anchor + k]]
                    numerator["distillation"] -= weight * ((goal @ head.T).softmax(-1) * log_q).sum()
                    numerator["regression"] += weight * (hidden[k - 1] - goal).square().sum() / goal.square().sum()
                    denominator += weight
    return sum(getattr(LOSSES, name) * value / denominator for name, value in numerator.items())


@pytest.mark.parametrize("fields", [{}, {"use_sliding_window": True, "sliding_window": 6, "layer_types": [
    "sliding_attention", "full_attention"]}], ids=["full", "sliding"])
def test_a_dflash_gradient_step_equals_pytorch(fields):
    model = tiny_target()
    draft = random_draft(model, block_size=BLOCK, **fields)
    target, params, batch = training_batch(model, (0, 2, 3))
    learner = DFlashLearner(draft, target, Recipe(anchors=5, gamma=3.0, losses=LOSSES))
    anchors, exists = sample_anchors(jax.random.key(0), batch, 5)
    assert exists.all()
    frozen = Frozen(params, params, None, learner.buffers)
    loss, gradient = jax.jit(jax.value_and_grad(lambda p: learner.outcome(p, frozen, batch, anchors, exists).loss))(learner.params)
    optimizer = optax.adamw(1e-2, weight_decay=0.1)
    updates, _ = optimizer.update(gradient, optimizer.init(learner.params), learner.params)
    ours = optax.apply_updates(learner.params, updates)

    draft.train().requires_grad_(True)
    theirs = _torch_dflash_loss(draft, model, batch, np.asarray(anchors), 3.0, 32)
    assert_step_is_torch_s(draft, theirs, loss, gradient, ours)


@pytest.mark.parametrize("name", ["llama", "gemma2", "granite"])
def test_active_logits_are_columns_of_the_whole_ones(name):
    model = tiny_target(name, tie_word_embeddings=name == "gemma2")
    target, params = Target(model, "cpu"), bridge.params_of(model)
    ids = np.array([3, 10, 11, 60, 96], np.int32)
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 32)), jnp.float32)
    cut = {**params, **target.head_rows(params, jnp.asarray(ids))}
    np.testing.assert_allclose(target.head(cut, hidden), target.head(params, hidden)[..., ids], atol=1e-5)
    assert vocabulary.columns_of(ids, 97)[[10, 12, 96]].tolist() == [1, -1, 4]


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_a_rounded_product_has_the_gradients_of_the_rounded_operands(platform):
    rng = np.random.default_rng(0)
    round_ = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16).astype(jnp.float32)
    x, weight, out = round_(70, 33), round_(40, 33), round_(70, 40)
    value, back = jax.vjp(lambda x, w: bridge.mixed_product(x, w, jnp.dtype(jnp.bfloat16), platform), x, weight)
    expected, plain_back = jax.vjp(lambda x, w: x @ w.T, x, weight)
    np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-4)
    for ours, theirs in zip(back(out), plain_back(out), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-4)


def test_a_deepened_draft_starts_as_what_it_grew_from():
    model = tiny_target()
    draft = random_draft(model, block_size=BLOCK)
    deeper = deepened(draft, 4)
    assert [len(d.layers) for d in (draft, deeper)] == [2, 4]
    assert deeper.config.backbone.num_hidden_layers == 4
    deeper.config.check_fits(Target(model, "cpu"))
    noise, attend = torch.randn(1, BLOCK, 32), lambda module, query, key, value: (query @ key.mT @ value).transpose(1, 2)
    grouped = lambda module, query, *pair: attend(module, query, *(x.repeat_interleave(2, dim=1) for x in pair))
    before, after = (each.denoise(noise, torch.arange(BLOCK)[None], grouped) for each in (draft, deeper))
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    with torch.no_grad():
        deeper.layers[3].mlp.down_proj.weight.fill_(0.1)
    assert not torch.equal(deeper.denoise(noise, torch.arange(BLOCK)[None], grouped), before), "the layers added are run"
    assert deepened(draft, None) is deepened(draft, 2) is draft
    with pytest.raises(ValueError, match="layers: 1, but the DFlashDraftModel to start from has 2"):
        deepened(draft, 1)


def test_bfloat16_compute_keeps_float32_parameters_and_about_the_same_loss():
    model = tiny_target()
    _, params, batch = training_batch(model, (0, 2, 3))
    losses = {}
    for dtype in (None, jnp.dtype(jnp.bfloat16)):
        target = Target(model, "cpu", products=dtype)
        learner = DFlashLearner(random_draft(model, block_size=BLOCK), target, Recipe(5, 3.0, LOSSES))
        frozen = Frozen(params, params, None, learner.buffers)
        where = sample_anchors(jax.random.key(0), batch, 5)
        step = jax.jit(jax.value_and_grad(lambda p: learner.outcome(p, frozen, batch, *where).loss))
        losses[dtype], gradient = step(learner.params)
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves((gradient, learner.params)))
    np.testing.assert_allclose(losses[jnp.dtype(jnp.bfloat16)], losses[None], rtol=0.03)
    assert losses[jnp.dtype(jnp.bfloat16)] != losses[None], "nothing was rounded"


def _trainer(trained_on, folder, steps, **options):
    model, train, held_out = trained_on
    target = Target(model, "cpu")
    draft = new_dflash(model, block_size=BLOCK, mask_token_id=MASK_ID, layers=1, taps=(0, 1, 2))
    recipe = Recipe(anchors=8, gamma=3.0, losses=LossWeights(distillation=0.5, regression=0.1))
    schedule = Schedule(steps=steps, batch_size=8, learning_rate=5e-3, evaluate_every=options.pop("evaluate_every", 5),
                        save_every=5, patience=options.pop("patience", None))
    datasets = [Dataset(corpus.read(path), layers=LAYERS) for path in (train, held_out)]
    params = bridge.params_of(model)
    active = vocabulary.occurring_ids(datasets[0].sequences, target.vocab_size)
    head = ({**params, **target.head_rows(params, jnp.asarray(active))}, vocabulary.columns_of(active, target.vocab_size))
    return draft, Trainer(DFlashLearner(draft, target, recipe), params, schedule, *datasets, folder, head=head, **options)


def test_training_lowers_the_loss_and_its_export_drafts_better(trained_on, tmp_path):
    draft, trainer = _trainer(trained_on, tmp_path / "run", steps=120, evaluate_every=40)
    before = trainer.evaluate(trainer.held_out)
    record = trainer.fit(progress=False)
    losses = [entry["loss"] for entry in _log(trainer) if "loss" in entry]
    assert np.mean(losses[-10:]) < 0.7 * np.mean(losses[:10])
    assert record.best_tau > max(1.5, before["tau"] + 0.3)

    export_dflash(draft, trainer.best_params(), tmp_path / "draft", dtype=torch.float32)
    model, _, held_out = trained_on
    prompts = [s.ids[: s.prompt_length].tolist() for _, shard in corpus.read(held_out) for s in shard]
    ids, mask = left_padded(prompts)
    trainer.params = trainer.best_params()
    (tau, steps), = trainer.loop_tau(trainer.held_out).values()
    with enabled(model, load_draft(tmp_path / "draft")):
        model.generate(ids, attention_mask=mask, max_new_tokens=40, do_sample=False)
        assert abs(last_stats(model).acceptance_length - tau) < 0.05, "hidden states are kept in bfloat16, so a near-tie may differ"
        assert abs(last_stats(model).num_steps / steps - 1) < 0.03
    ids, mask = left_padded(random_prompts((5, 7, 6, 4), seed=1))
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=40, do_sample=False)
    with enabled(model, load_draft(tmp_path / "draft")):
        assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=40, do_sample=False), expected)
        assert last_stats(model).acceptance_length > 1.5


def _log(trainer):
    import json

    return [json.loads(line) for line in (trainer.folder / "log.jsonl").read_text().split("\n") if line]


def test_a_killed_run_resumes_to_the_same_numbers(trained_on, tmp_path):
    _, whole = _trainer(trained_on, tmp_path / "whole", steps=14)
    whole.fit(progress=False)
    calls = iter(range(100))
    _, killed = _trainer(trained_on, tmp_path / "killed", steps=14)
    killed._save = lambda began: began if killed.record.step > 5 else Trainer._save(killed, began)  # dies before it can save again
    killed.fit(progress=False, stop=lambda: next(calls) >= 8)
    _, resumed = _trainer(trained_on, tmp_path / "killed", steps=14)
    assert resumed.record.step == 5
    resumed.fit(progress=False)
    without_time = lambda trainer: [{k: v for k, v in entry.items() if k != "seconds"} for entry in _log(trainer)]
    assert without_time(resumed) == without_time(whole)
    for name, value in whole.params.items():
        np.testing.assert_array_equal(value, resumed.params[name], err_msg=name)


def test_training_stops_for_good_when_patience_ends(trained_on, tmp_path):
    for _ in range(2):
        _, trainer = _trainer(trained_on, tmp_path, steps=40, evaluate_every=1, patience=2)
        trainer.train_step = lambda params, state, *rest: (params, state, 1.0, 1.0, 0)  # nothing is learned
        assert trainer.fit(progress=False).step == 3
    assert (tmp_path / BEST).is_file()
    with pytest.raises(ValueError, match="patience: 2, but no prompts are held out"):
        Trainer(trainer.learner, trainer.frozen.target, trainer.schedule, trainer.dataset, None, tmp_path)


def test_the_last_step_is_evaluated_and_may_be_the_best(trained_on, tmp_path):
    _, trainer = _trainer(trained_on, tmp_path, steps=7)
    trainer.fit(progress=False)
    assert [entry["step"] for entry in _log(trainer) if "held_out" in entry] == [5, 7]
    (tmp_path / BEST).unlink()
    for name, value in trainer.best_params().items():
        np.testing.assert_array_equal(value, trainer.params[name], err_msg="nothing was judged: the last ones")
    (tmp_path / "checkpoint.safetensors").unlink()
    with pytest.raises(ValueError, match="nothing has been trained"):
        trainer.best_params()


def test_a_checkpoint_of_another_draft_is_refused_by_name(trained_on, tmp_path):
    model, *_ = trained_on
    draft, trainer = _trainer(trained_on, tmp_path, steps=1)
    trainer.fit(progress=False)
    draft.config = dataclasses.replace(draft.config, block_size=BLOCK + 1)
    params = tensors_of(draft)[0]
    with pytest.raises(ValueError, match="block_size: 5, but .* was trained with 4"):
        trained_params(tmp_path, params, identity_of(draft))
    draft.config = dataclasses.replace(draft.config, block_size=BLOCK)
    draft.vocabulary = torch.arange(20)
    with pytest.raises(ValueError, match="draft_vocabulary: 20 ids, crc32 .* was trained with None"):
        trained_params(tmp_path, params, identity_of(draft))


def test_a_draft_that_guesses_among_all_ids_is_judged_on_all(trained_on, tmp_path):
    model, _, held_out = trained_on
    target, params = Target(model, "cpu"), bridge.params_of(model)
    ids = np.arange(10, dtype=np.int32)  # the head of training knows few
    head = ({**params, **target.head_rows(params, jnp.asarray(ids))}, vocabulary.columns_of(ids, target.vocab_size))
    dataset = Dataset(corpus.read(held_out), layers=LAYERS)
    draft = new_dflash(model, block_size=BLOCK, mask_token_id=MASK_ID, layers=1, taps=(0, 1, 2))
    learner = DFlashLearner(draft, target, Recipe(8, 3.0, LossWeights()))
    judge = lambda folder, **options: Trainer(learner, params, Schedule(1), dataset, dataset, tmp_path / folder, **options)
    all_ids, few, judged = judge("a"), judge("b", head=head), judge("c", head=head, judged_on_all=True)
    assert judged.evaluate(dataset) == all_ids.evaluate(dataset) != few.evaluate(dataset)
    assert judged.loop_tau(dataset) == all_ids.loop_tau(dataset)
    assert judged.frozen.columns is not None, "the loss runs over the few"


def test_recorded_features_are_those_of_one_forward(trained_on):
    model, folder, _ = trained_on
    file, sequences = corpus.read(folder)[0]
    lengths = [len(s.ids) for s in sequences]
    recorded, some = ShardFeatures(file, LAYERS, lengths), ShardFeatures(file, (3, 0), lengths)
    reader = TapReader(Target(model, "cpu"), bridge.params_of(model), LAYERS)
    ids = np.stack([np.pad(s.ids, (0, 64 - len(s.ids))) for s in sequences])
    fresh = np.asarray(reader(ids))
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(recorded[row][: length - 1].astype(np.float32), fresh[row, : length - 1], rtol=0.02, atol=1e-3)
    np.testing.assert_array_equal(some[1], recorded[1].reshape(-1, 4, 32)[:, [3, 0]].reshape(-1, 64))
    with pytest.raises(FileNotFoundError, match=r"layers \[7\]"):
        ShardFeatures(file, (7,), lengths)
    computed = []
    compute_missing([(file, sequences)], reader, LAYERS, 64, on_shard=computed.append)
    assert not computed, "what was recorded is not computed again"


@pytest.mark.parametrize(("shard_format", "temperature"), [("safetensors", 0.0), ("jsonl", 0.9)])
def test_a_killed_generation_resumes_to_the_same_corpus(tmp_path, shard_format, temperature):
    model = tiny_target()
    plan = corpus.CorpusPlan([("a", ids) for ids in random_prompts((5, 9, 3, 7, 6))], 2, 12, (7, 11), "", temperature)
    corpus.generate(model, plan, tmp_path / "whole", shard_format=shard_format)
    after_one = iter([False, True])
    assert not corpus.generate(model, plan, tmp_path / "parts", shard_format=shard_format, stop=lambda: next(after_one))
    assert len(corpus.read(tmp_path / "parts")) == 1
    made = []
    assert corpus.generate(model, plan, tmp_path / "parts", shard_format=shard_format, on_shard=lambda *done: made.append(done))
    assert [done[:2] for done in made] == [(2, 3), (3, 3)]
    whole, parts = (sum((sequences for _, sequences in corpus.read(tmp_path / name)), []) for name in ("whole", "parts"))
    assert len(whole) == 5
    for a, b in zip(whole, parts, strict=True):
        assert (a.ids.tolist(), a.prompt_length, a.task) == (b.ids.tolist(), b.prompt_length, b.task)
        assert a.ids[: a.prompt_length].tolist() in [ids for _, ids in plan.prompts]
    with pytest.raises(ValueError, match="other settings"):
        corpus.generate(model, corpus.CorpusPlan(plan.prompts, 2, 13, (7, 11)), tmp_path / "whole")
    positions = model.config.max_position_embeddings
    with pytest.raises(ValueError, match=f"max_new_tokens: {positions} .* beyond max_position_embeddings = {positions}"):
        corpus.generate(model, corpus.CorpusPlan(plan.prompts, 2, positions, (7, 11)), tmp_path / "long")
    assert not (tmp_path / "long").exists()
