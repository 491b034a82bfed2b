"""Laws of EAGLE-3: exact whatever the draft, drafts as a textbook loop does, gradient as PyTorch's, all layouts read alike."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_torchax import bridge, enabled, last_stats, load_draft
from dflash_torchax.eagle3_model import Eagle3Config, Eagle3DraftModel
from dflash_torchax.target import Target
from dflash_torchax.training import corpus, vocabulary
from dflash_torchax.training.chains import Eagle3Learner
from dflash_torchax.training.dataset import Dataset
from dflash_torchax.training.export import export_eagle3
from dflash_torchax.training.initial import new_eagle3
from dflash_torchax.training.learner import Frozen, Recipe, sample_anchors
from dflash_torchax.training.losses import LossWeights
from dflash_torchax.training.taps import TapReader
from dflash_torchax.training.trainer import Schedule, Trainer

from .tiny import VOCAB, assert_step_is_torch_s, left_padded, random_prompts, tiny_target
from .training_cases import training_batch

BLOCK = 4
TAPS = (0, 1, 3)
NEW_TOKENS = 24


def random_eagle3(model, rows=60, **fields):
    """An EAGLE-3 draft with random weights and a vocabulary of `rows` random ids."""
    config = Eagle3Config.from_dict({
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": VOCAB, "draft_vocab_size": rows, "rms_norm_eps": 1e-6, "max_position_embeddings": 512, "block_size": BLOCK,
        "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in TAPS], **fields,
    })
    torch.manual_seed(3)
    draft = Eagle3DraftModel(config).eval()
    ids = torch.randperm(VOCAB)[:rows].sort().values
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.25)
        draft.d2t.copy_(ids - torch.arange(rows))
    return draft


def _textbook_attention(keys, values):
    """An `attend` for one row that appends to `keys` and `values` and is causal over them."""

    def attend(module, query, key, value):
        keys.append(key)
        values.append(value)
        key, value = (torch.cat(x, dim=2).repeat_interleave(2, dim=1) for x in (keys, values))
        behind = torch.arange(key.shape[2]) - torch.arange(key.shape[2] - query.shape[2], key.shape[2])[:, None]
        scores = (query @ key.transpose(2, 3) * module.head_dim**-0.5).masked_fill(behind > 0, -torch.inf)
        return (scores.softmax(-1) @ value).transpose(1, 2)

    return attend


def _textbook_chain(draft, embedding, ids, taps, anchor, tokens):
    """Un-normed hidden states of a chain of len(tokens) + 1 drafts behind `anchor`, in plain PyTorch.

    `tokens` are the drafted (or true) tokens at anchor + 1 ..
    """
    attend = _textbook_attention([], [])
    hidden = draft.fuse(taps[None, :anchor])
    hidden = draft.advance(embedding[ids[None, 1 : anchor + 1]], hidden, torch.arange(anchor)[None], attend)[:, -1:]
    outputs = [hidden]
    for offset, token in enumerate(tokens):
        hidden = draft.advance(embedding[token][None, None], hidden, torch.tensor([[anchor + offset]]), attend)
        outputs.append(hidden)
    return torch.cat(outputs, dim=1)[0]


@pytest.fixture(scope="module")
def trained(trained_on, tmp_path_factory):
    """(target, folder of an EAGLE-3 draft trained for it, held-out tau before and after)."""
    model, train, held_out = trained_on
    folder, layers = tmp_path_factory.mktemp("eagle3"), (*TAPS, 3)
    target, params = Target(model, "cpu"), bridge.params_of(model)
    reader = TapReader(target, params, layers)  # taps recomputed at every step
    dataset, held = (Dataset(corpus.read(path), width=64) for path in (train, held_out))
    ids = vocabulary.frequent_ids(dataset.sequences, VOCAB, 80)
    draft = new_eagle3(model, block_size=BLOCK, vocabulary=ids, taps=TAPS)
    head = ({**params, **target.head_rows(params, jnp.asarray(ids))}, vocabulary.columns_of(ids, VOCAB))
    learner = Eagle3Learner(draft, target, Recipe(anchors=8, gamma=3.0, losses=LossWeights(distillation=0.5)))
    schedule = Schedule(steps=80, learning_rate=5e-3, evaluate_every=40)
    trainer = Trainer(learner, params, schedule, dataset, held, folder / "run", head=head, reader=reader)
    before = trainer.evaluate(held)["tau"]
    after = trainer.fit(progress=False).best_tau
    return model, export_eagle3(draft, trainer.best_params(), folder / "draft", dtype=torch.float32), before, after


@pytest.mark.parametrize("norm_before_residual", [False, True], ids=["safeailab", "speculators"])
def test_generation_is_exact_and_accepts_what_a_textbook_loop_accepts(trained, norm_before_residual):
    model, folder, *_ = trained
    draft = load_draft(folder)
    draft.midlayer.norm_before_residual = norm_before_residual
    prompts = random_prompts((9, 4, 75))  # the last one is caught up with in chunks
    ids, mask = left_padded(prompts)
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)
    with enabled(model, draft):
        assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False), expected)
        stats = last_stats(model)
    assert stats.num_accepted_tokens > 0
    for prompt, row, steps in zip(prompts, expected[:, ids.shape[1] :], stats.accepted_per_step, strict=True):
        assert _textbook_acceptance(model, draft, torch.tensor(prompt + row.tolist()), len(prompt)) == steps


def test_a_reused_cache_drafts_as_a_fresh_one(trained):
    model, folder, *_ = trained
    prompt = torch.tensor(random_prompts((30,), seed=4))
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    ask = lambda ids, cache=None: model.generate(ids, attention_mask=torch.ones_like(ids), cache=cache, **options)
    with enabled(model, load_draft(folder)):
        cache = ask(prompt).cache
        for keep in (17, 29, 30):
            other = torch.cat([prompt[:, :keep], torch.tensor(random_prompts((8,), seed=keep + 50))], dim=1)
            fresh, fresh_steps = ask(other).sequences, last_stats(model).accepted_per_step
            assert torch.equal(ask(other, cache).sequences, fresh)
            assert last_stats(model).accepted_per_step == fresh_steps


def test_sampling_by_rejection_is_refused_by_name():
    model = tiny_target()
    with enabled(model, random_eagle3(model), draft_sampling="probabilistic"), pytest.raises(NotImplementedError, match="greedy"):
        model.generate(torch.tensor([[7, 8, 9]]), max_new_tokens=4, do_sample=True, pad_token_id=0)


@torch.no_grad()
def _textbook_acceptance(model, draft, sequence, prompt_length):
    states = model(sequence[None], output_hidden_states=True).hidden_states
    taps = torch.cat([states[tap + 1][0] for tap in TAPS], dim=-1)
    embedding, steps, anchor = model.get_input_embeddings().weight, [], prompt_length
    while anchor < len(sequence) - 1:
        tokens = []
        for _ in range(BLOCK - 1):
            hidden = _textbook_chain(draft, embedding, sequence, taps, anchor, tokens)[-1]
            best = draft.logits(hidden).argmax()
            tokens.append(best + draft.d2t[best])
        true = sequence[anchor + 1 : anchor + BLOCK]
        agrees = [int(a) == int(b) for a, b in zip(tokens, true, strict=False)] + [False]
        accepted = min(agrees.index(False), len(sequence) - 2 - anchor)
        steps.append(accepted)
        anchor += accepted + 1
    return steps


def test_an_eagle3_gradient_step_equals_pytorch():
    model, losses = tiny_target(), LossWeights(tokens=1.0, distillation=0.5)
    draft = random_eagle3(model)
    target, params, batch = training_batch(model, (*TAPS, 3))
    ids = (np.arange(60) + draft.d2t.numpy()).astype(np.int32)
    columns = vocabulary.columns_of(ids, VOCAB)
    learner = Eagle3Learner(draft, target, Recipe(anchors=5, gamma=3.0, losses=losses))
    anchors, exists = sample_anchors(jax.random.key(0), batch, 5)
    frozen = Frozen(params, {**params, **target.head_rows(params, jnp.asarray(ids))}, jnp.asarray(columns), learner.buffers)
    loss, gradient = jax.jit(jax.value_and_grad(lambda p: learner.outcome(p, frozen, batch, anchors, exists).loss))(learner.params)
    optimizer = optax.adamw(1e-2, weight_decay=0.1)
    updates, _ = optimizer.update(gradient, optimizer.init(learner.params), learner.params)
    ours = optax.apply_updates(learner.params, updates)

    draft.requires_grad_(True)
    embedding, head = model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()[ids]
    features, tokens = torch.from_numpy(np.array(batch.features)), torch.from_numpy(np.array(batch.ids)).long()
    hard = soft = known = total = 0.0
    for row, row_anchors in enumerate(np.asarray(anchors)):
        for anchor in row_anchors.tolist():
            true = tokens[row, anchor + 1 : anchor + BLOCK]
            hidden = _textbook_chain(draft, embedding, tokens[row], features[row, :, :96], anchor, list(true[:-1]))
            log_q = draft.logits(hidden).log_softmax(-1)
            for k in range(1, BLOCK):
                if anchor + k < int(batch.lengths[row]):
                    weight = float(np.exp(-(k - 1) / 3.0))
                    column = columns[int(tokens[row, anchor + k])]
                    if column >= 0:
                        hard, known = hard - weight * log_q[k - 1, column], known + weight
                    goal = (features[row, anchor + k - 1, 96:] @ head.T).softmax(-1)
                    soft, total = soft - weight * (goal * log_q[k - 1]).sum(), total + weight
    theirs = hard / known + 0.5 * soft / total
    assert_step_is_torch_s(draft, theirs, loss, gradient, ours)


def test_training_makes_an_eagle3_draft_that_drafts(trained):
    model, folder, before, after = trained
    assert after > max(1.5, before + 0.3)
    ids, mask = left_padded(random_prompts((5, 7, 6, 4), seed=1))
    with enabled(model, load_draft(folder)):
        model.generate(ids, attention_mask=mask, max_new_tokens=40, do_sample=False)
        assert last_stats(model).acceptance_length > 1.5


def test_every_published_layout_reads_to_the_same_draft(tmp_path):
    model = tiny_target()
    draft = random_eagle3(model)
    params = {name: p.detach().numpy() for name, p in draft.named_parameters()}
    first = export_eagle3(draft, params, tmp_path / "safeailab", dtype=torch.float32)
    fields, tensors = json.loads((first / "config.json").read_text()), load_file(first / "model.safetensors")
    assert int(tensors["t2d"].sum()) == 60

    torch_only, speculators = tmp_path / "bin", tmp_path / "speculators"
    for folder in (torch_only, speculators):
        folder.mkdir()
    (torch_only / "config.json").write_text(json.dumps(fields))
    torch.save(tensors, torch_only / "pytorch_model.bin")
    layer = {k: v for k, v in fields.items() if k not in ("architectures", "draft_vocab_size", "eagle_config", "block_size")}
    (speculators / "config.json").write_text(json.dumps({
        "speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"], "transformer_layer_config": layer,
        "draft_vocab_size": 60, "norm_before_residual": False, "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": fields["eagle_config"]["eagle_aux_hidden_state_layer_ids"],
        "speculators_config": {"proposal_methods": [{"speculative_tokens": BLOCK - 1}]},
    }))
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    save_file(renamed, speculators / "model.safetensors")
    for folder in (first, torch_only, speculators):
        read = load_draft(folder)
        assert read.config.block_size == BLOCK
        assert read.config.taps_for(4) == TAPS
        for name, tensor in draft.state_dict().items():
            torch.testing.assert_close(read.state_dict()[name], tensor, rtol=0, atol=0, msg=name)


def test_a_draft_of_another_target_is_refused_by_name(tmp_path):
    model = tiny_target()
    with pytest.raises(ValueError, match="eagle_aux_hidden_state_layer_ids"):
        random_eagle3(model, eagle_aux_hidden_state_layer_ids=[1, 2, 9]).config.check_fits(Target(model, "cpu"))
    draft = random_eagle3(model)
    folder = export_eagle3(draft, {name: p.detach().numpy() for name, p in draft.named_parameters()}, tmp_path)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"draft_vocab_size": 61}))
    with pytest.raises(ValueError, match="d2t"):
        load_draft(folder)
