"""Laws of training: the gradient is PyTorch's, a killed run resumes to the same numbers, training makes a draft that drafts."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from dflash_torchax import bridge
from dflash_torchax.target import Target
from dflash_torchax.training.blocks import DFlashLearner
from dflash_torchax.training.learner import Batch, Frozen, Recipe, sample_anchors
from dflash_torchax.training.losses import LossWeights
from dflash_torchax.training.taps import features_of

from .tiny import random_draft, random_prompts, tiny_target

WIDTH, BLOCK = 32, 4
LOSSES = LossWeights(tokens=1.0, distillation=0.5, regression=0.25)


def _batch(model, layers, rows=2):
    """Random sequences as a training batch, with the target's own hidden states."""
    sequences = random_prompts((WIDTH - 4, WIDTH - 9)[:rows], seed=3)
    ids = np.zeros((rows, WIDTH), np.int32)
    for row, sequence in zip(ids, sequences, strict=True):
        row[: len(sequence)] = sequence
    target = Target(model, "cpu")
    params = bridge.params_of(model)
    features = jax.jit(lambda p, i: features_of(target, p, i, layers))(params, ids)
    lengths = np.array([len(s) for s in sequences], np.int32)
    return target, params, Batch(jnp.asarray(ids), jnp.array([6, 9], jnp.int32)[:rows], jnp.asarray(lengths), features)


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
    target, params, batch = _batch(model, (0, 2, 3))
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
    theirs.backward()
    np.testing.assert_allclose(float(loss), float(theirs.detach()), rtol=1e-5)
    for name, parameter in draft.named_parameters():
        np.testing.assert_allclose(gradient[name], parameter.grad, atol=1e-4, err_msg=name)
    torch.optim.AdamW(draft.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-8).step()
    for name, parameter in draft.named_parameters():
        np.testing.assert_allclose(ours[name], parameter.detach(), atol=1e-4, err_msg=name)
