"""Logits over the tokens that occur instead of over the whole vocabulary: most of a small draft's training time."""

import numpy as np


def occurring_ids(sequences, vocab_size):
    """int32 [n], ascending: every id a continuation of the corpus holds."""
    seen = np.zeros(vocab_size, bool)
    for sequence in sequences:
        seen[sequence.ids[sequence.prompt_length :]] = True
    return np.flatnonzero(seen).astype(np.int32)


def frequent_ids(sequences, vocab_size, count):
    """int32 [count], ascending: the most frequent ids of the continuations (ties and unseen ids in id order)."""
    counts = np.zeros(vocab_size, np.int64)
    for sequence in sequences:
        np.add.at(counts, sequence.ids[sequence.prompt_length :], 1)
    return np.sort(np.argsort(-counts, kind="stable")[:count]).astype(np.int32)


def columns_of(ids, vocab_size):
    """int32 [vocab]: the column of each id among `ids`, -1 where it has none."""
    columns = np.full(vocab_size, -1, np.int32)
    columns[ids] = np.arange(len(ids), dtype=np.int32)
    return columns
