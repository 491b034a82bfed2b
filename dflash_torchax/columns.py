"""From ragged commits to HF's columns: one token per row at a time, each exactly once and in order."""

import numpy as np
import torch


class Columns:
    """HF's growing `input_ids`, fed by commits of different lengths per row.

    Args:
        input_ids: int64 [batch, width], the prompt as HF laid it out.
        pad_id: what a row says after its end.
        criteria: HF `StoppingCriteriaList` to ask after every column, or None.
        has_eos: whether a row that met a criterion is padded; without an eos HF lets it talk on until all have met one.
    """

    def __init__(self, input_ids, pad_id, criteria=None, has_eos=True):
        self.input_ids = input_ids.cpu()
        self.pad_id, self.criteria, self.has_eos = pad_id, criteria, has_eos
        self.met = np.zeros(len(input_ids), bool)
        self.rows = [[] for _ in range(len(input_ids))]
        self.bonuses = [[] for _ in range(len(input_ids))]  # columns of the tokens that no draft proposed
        self.ended = np.zeros(len(input_ids), bool)  # by criteria; eos and limits end rows on the device
        self.sent = 0
        self.taken = [0] * len(input_ids)

    def add(self, committed):
        """Take in a step's `engine.Committed`; yield int64 [batch] for every column that is complete now."""
        for index in np.flatnonzero(~self.ended & (committed.counts > 0)):
            self.rows[index].extend(committed.tokens[index, : committed.counts[index]].tolist())
            self.bonuses[index].append(len(self.rows[index]) - 1)
        while (column := self._next(committed.finished)) is not None:
            self.sent += 1
            self.input_ids = torch.cat([self.input_ids, column[:, None]], dim=1)
            yield column
            if self.criteria is not None:
                self._ask()

    def take(self):
        """(tokens per row since the last call, how many of them were drafted); what a criterion may still cut is kept back."""
        ends = [len(row) if self.criteria is None else min(len(row), self.sent) for row in self.rows]
        spans = list(zip(self.taken, ends, strict=True))
        self.taken = ends
        new = [row[start:end] for row, (start, end) in zip(self.rows, spans, strict=True)]
        bonuses = [sum(start <= at < end for at in row) for row, (start, end) in zip(self.bonuses, spans, strict=True)]
        return new, [len(tokens) - bonus for tokens, bonus in zip(new, bonuses, strict=True)]

    def _next(self, finished):
        done = self.ended | finished
        lengths = np.array([len(row) for row in self.rows])
        if not (lengths > self.sent).any() or (~done & (lengths <= self.sent)).any():
            return None
        return torch.tensor([row[self.sent] if self.sent < len(row) else self.pad_id for row in self.rows])

    def _ask(self):
        self.met |= np.asarray(self.criteria(self.input_ids, None).cpu(), bool)
        ending = self.met if self.has_eos or self.met.all() else np.zeros_like(self.met)
        for index in np.flatnonzero(ending & ~self.ended):
            # Ended where it said its last word already: nothing to cut. Else the rest of its block goes.
            del self.rows[index][self.sent :]
            self.ended[index] = True
