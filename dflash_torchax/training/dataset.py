"""Sequences of a corpus as batches, in an order that depends on the seed and the step alone."""

import ml_dtypes
import numpy as np

from .learner import Batch
from .taps import ShardFeatures


class Dataset:
    """A corpus in memory, its features on disk.

    Args:
        shards: what `corpus.read` returns.
        width: slots of a batch; None takes the longest sequence, rounded up to a multiple of 32.
        layers: layers of the feature files to read; None leaves `Batch.features` to the caller.
    """

    def __init__(self, shards, *, layers=None, width=None):
        self.sequences, self.places = [], []
        self.features = []
        for file, sequences in shards:
            if layers is not None:
                self.features.append(ShardFeatures(file, layers, [len(s.ids) for s in sequences]))
            for row, sequence in enumerate(sequences):
                if len(sequence.ids) - sequence.prompt_length >= 2:  # an anchor and a label
                    self.sequences.append(sequence)
                    self.places.append((len(self.features) - 1, row))
        if not self.sequences:
            raise ValueError("corpus: no continuation has two tokens or more; generate with a larger max_new_tokens.")
        longest = max(len(s.ids) for s in self.sequences)
        self.width = -(-longest // 32) * 32 if width is None else width
        if longest > self.width:
            raise ValueError(f"width: {self.width}, but the longest sequence has {longest} tokens.")
        self.tasks = sorted({s.task for s in self.sequences})

    def __len__(self):
        return len(self.sequences)

    def batch(self, indices):
        """`Batch` of numpy arrays; an index of -1 makes an empty row."""
        rows = len(indices)
        ids = np.zeros((rows, self.width), np.int32)
        prompt_lengths, lengths = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        features = None
        for row, index in enumerate(indices):
            if index < 0:
                continue
            sequence, (shard, place) = self.sequences[index], self.places[index]
            length = len(sequence.ids)
            ids[row, :length], prompt_lengths[row], lengths[row] = sequence.ids, sequence.prompt_length, length
            if self.features:
                feature = self.features[shard][place]
                if features is None:
                    features = np.zeros((rows, self.width, feature.shape[1]), ml_dtypes.bfloat16)
                features[row, :length] = feature
        return Batch(ids, prompt_lengths, lengths, features)

    def indices_at(self, step, rows, seed):
        """The sequences of a training step: epochs of fresh permutations, cut into steps of `rows`."""
        flat = np.arange(step * rows, (step + 1) * rows)
        epochs = {epoch: np.random.default_rng([seed, epoch]).permutation(len(self)) for epoch in set(flat // len(self))}
        return [int(epochs[i // len(self)][i % len(self)]) for i in flat]

    def in_order(self, rows):
        """Index lists that cover every sequence once, the last filled up with -1."""
        for start in range(0, len(self), rows):
            indices = list(range(start, min(start + rows, len(self))))
            yield indices + [-1] * (rows - len(indices))
