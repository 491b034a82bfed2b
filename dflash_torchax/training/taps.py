"""What a draft learns from: the target's hidden states at chosen layers, for every token of a corpus.

They are kept beside the shards as bfloat16, one file per shard and set of layers. `Recorder` takes them for nothing
while the corpus is generated; `compute_missing` makes what is not there. The last layer's entry is the final, normed
hidden state, the one the head reads.
"""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from .. import bridge
from ..attention import AttentionView
from ..cache import StaticKV, write_rows
from ..proposers import Autoregressive


class Recorder:
    """A proposer that drafts nothing and keeps the context feature of every slot in its cache.

    Args:
        target: `target.Target`.
        layers: target layers to keep.
    """

    block_size = 1
    params = ()

    def __init__(self, target, layers):
        self.taps = tuple(layers)
        self.width = len(self.taps) * target.hidden_size
        self.dtype = target.dtype

    def create_cache(self, batch_size, slots):
        return jnp.zeros((batch_size, slots, self.width), self.dtype)

    def inject(self, params, cache, feature, starts, positions):
        return write_rows(cache, feature, starts, axis=0)

    def propose(self, params, target_params, state):
        return Autoregressive.propose(self, params, target_params, state)


class TapReader:
    """Compiled `read(ids) -> features`: one causal forward of the target over whole sequences."""

    def __init__(self, target, target_params, layers):
        self.params = target_params
        self._forward = jax.jit(lambda params, ids: features_of(target, params, ids, layers))

    def __call__(self, ids):
        """int32 [batch, width] right-padded -> [batch, width, layers * hidden]."""
        return self._forward(self.params, ids)


def features_of(target, target_params, ids, layers):
    """The target's hidden states at `layers`, [batch, width, layers * hidden]; padding is never read by what precedes it."""
    batch_size, width = ids.shape
    positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), ids.shape)
    cache = StaticKV.create(target.layout, batch_size, width)
    view = AttentionView(cache, positions[:, 0], positions)
    return target.forward(target_params, ids, view, tuple(layers)).feature


def feature_file(shard, layers):
    """Where the features of a shard live."""
    shard = Path(shard)
    return shard.parent / ("taps-" + "-".join(map(str, layers))) / f"{shard.stem}.safetensors"


def find_features(shard, layers):
    """(feature file of a shard that holds all of `layers`, the layers it holds), or None; exactly these layers come first."""
    shard = Path(shard)
    found = [tuple(map(int, file.parent.name.split("-")[1:])) for file in shard.parent.glob(f"taps-*/{shard.stem}.safetensors")]
    fitting = sorted((held for held in found if set(layers) <= set(held)), key=lambda held: (held != tuple(layers), held))
    return (feature_file(shard, fitting[0]), fitting[0]) if fitting else None


def save_features(file, rows):
    """Write one shard's features: a list of [length, width] arrays, kept as bfloat16, published by one rename."""
    file.parent.mkdir(parents=True, exist_ok=True)
    packed = np.concatenate([np.asarray(row, ml_dtypes.bfloat16) for row in rows])
    scratch = file.with_name("writing-" + file.name)
    save_file({"features": packed.view(np.uint16)}, scratch)
    os.replace(scratch, file)


class ShardFeatures:
    """One shard's features at `layers`, read from disk row by row.

    Args:
        shard: the shard's file.
        layers: layers wanted, in this order.
        lengths: tokens of each of the shard's sequences.

    Raises:
        FileNotFoundError: no feature file holds these layers.
    """

    def __init__(self, shard, layers, lengths):
        found = find_features(shard, layers)
        if found is None:
            raise FileNotFoundError(f"corpus: no hidden states of layers {list(layers)} beside {shard}; run compute_missing first.")
        self.file, held = found
        self.held, self.picked = len(held), [held.index(layer) for layer in layers]
        self.bounds = np.concatenate([[0], np.cumsum(lengths)])
        self.opened = None

    def __getitem__(self, row):
        """[length, layers * hidden] bfloat16 of a sequence."""
        if self.opened is None:
            self.opened = safe_open(self.file, framework="numpy").__enter__()
        start, stop = int(self.bounds[row]), int(self.bounds[row + 1])
        rows = self.opened.get_slice("features")[start:stop]
        picked = rows.reshape(len(rows), self.held, -1)[:, self.picked]
        return picked.reshape(len(rows), -1).view(ml_dtypes.bfloat16)


def compute_missing(shards, reader, layers, width, batch_size=8, on_shard=None, stop=None):
    """Make the feature file of every shard that has none with these layers.

    Args:
        shards: list of (shard file, its sequences).
        reader: `TapReader` for `layers`.
        width: slots every batch is padded to.
        batch_size: sequences per forward.
        on_shard: called after each shard that lacked them.
        stop: called before each of those; true ends it there.

    Returns:
        whether all of them have one now.
    """
    for file, sequences in shards:
        if find_features(file, layers) is None:
            if stop is not None and stop():
                return False
            rows = []
            for start in range(0, len(sequences), batch_size):
                chunk = sequences[start : start + batch_size]
                ids = np.zeros((batch_size, width), np.int32)
                for row, sequence in zip(ids, chunk, strict=False):
                    row[: len(sequence.ids)] = sequence.ids
                features = np.asarray(reader(ids).astype(jnp.bfloat16))
                rows += [features[i, : len(s.ids)] for i, s in enumerate(chunk)]
            save_features(feature_file(file, layers), rows)
            if on_shard is not None:
                on_shard(file)
    return True


def target_params_of(model):
    """The target's weights: those `load_target` left on a meta model, else the module's own."""
    from ..loading import PARAMS_ATTRIBUTE

    return getattr(model, PARAMS_ATTRIBUTE, None) or bridge.params_of(model)
