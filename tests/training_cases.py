"""A tiny target whose text can be learned, corpora of it, and a batch of random sequences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from dflash_torchax import bridge
from dflash_torchax.target import Target
from dflash_torchax.training import corpus
from dflash_torchax.training.learner import Batch
from dflash_torchax.training.taps import features_of

from .tiny import random_prompts, tiny_target

WIDTH = 32
LAYERS = (0, 1, 2, 3)


def training_batch(model, layers, rows=2):
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


@pytest.fixture(scope="session")
def trained_on(tmp_path_factory):
    """(tiny target, corpus folder, held-out folder); weak layers make its next token follow mostly from the last one,
    which a draft can learn."""
    model = tiny_target(seed=4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layers" in name and parameter.ndim == 2:
                parameter.mul_(0.4)
    folders = []
    for name, seed, count in (("train", 0, 48), ("held-out", 1, 8)):
        folder = tmp_path_factory.mktemp(name)
        prompts = [("text", ids) for ids in random_prompts([4 + i % 5 for i in range(count)], seed)]
        corpus.generate(model, corpus.CorpusPlan(prompts, 8, 40, ()), folder, layers=LAYERS)
        folders.append(folder)
    return model, *folders
