"""Generation with logits on the host: for processors, criteria and outputs that only HF's own objects know.

Every processor and criterion is called once per column with the true prefix, in order, exactly as HF's loop does, so that
stateful ones and HF's random numbers come out the same. All rows accept the same number of tokens per step.
"""

import dataclasses

import jax
import numpy as np
import torch

from .engine import Generation, prefill_tokens
from .session import GenerationCache
from .state import DecodeStats


@dataclasses.dataclass
class HostRun:
    """One call on the host path.

    Fields:
        engine, request: as for `Engine.run`; the request has no eos ids, the criteria know them.
        input_ids: int64 [batch, width] as HF laid it out; grows.
        processors, criteria: HF's lists.
        do_sample, pad_id, has_eos: as in HF's loop.
        streamer: HF streamer or None.
        keep_scores, keep_logits: collect processed scores, raw logits: float32 [batch, vocab] per column.
    """

    engine: object
    request: object
    input_ids: torch.Tensor
    processors: object
    criteria: object
    do_sample: bool
    pad_id: int
    has_eos: bool
    streamer: object = None
    generator: torch.Generator | None = None
    keep_scores: bool = False
    keep_logits: bool = False
    scores: tuple = ()
    logits: tuple = ()

    @torch.no_grad()  # some processors run the torch model
    def run(self):
        """Run to the end: `Generation`; `input_ids`, `scores` and `logits` are filled."""
        rows = len(self.input_ids)
        self.unfinished = torch.ones(rows, dtype=torch.bool)
        counts = ([0] * rows, [0] * rows, [[] for _ in range(rows)])
        state, logits = self.engine.read(self.request)
        columns = self._columns(np.zeros((rows, 0), np.int32), logits)
        while True:
            state = self._commit(state, columns)
            if not self.unfinished.any():
                break
            active, before = self._talking().clone(), self.input_ids.shape[1]
            padded = jax.device_put(np.pad(~active.numpy(), (0, state.finished.shape[0] - rows)))
            state, drafted, logits = self.engine.propose_and_verify(self.engine.params, state, padded, np.int32(self.pad_id))
            columns = self._columns(np.array(jax.device_get(drafted)[:rows]), logits)
            room = self.criteria.max_length - before
            _count(counts, active, len(columns), min(drafted.shape[1], room - 1))
        tokens, lengths = (x[:rows] for x in jax.device_get((state.tokens, state.lengths)))
        cache = GenerationCache.of(state, tokens, lengths, self.engine) if self.request.keep_cache else None
        steps, num_drafted, accepted = counts
        longest = max(map(len, accepted), default=0)
        table = np.array([row + [0] * (longest - len(row)) for row in accepted], np.int32).reshape(rows, longest)
        stats = DecodeStats.from_counts(steps, num_drafted, table, self.engine.block_size, prefill_tokens(self.request))
        return Generation(tokens, lengths, stats, cache)

    def _columns(self, drafted, logits):
        """Choose tokens column by column, as long as all running rows were drafted right: list of int64 [batch]."""
        logits = torch.from_numpy(np.array(jax.device_get(logits)[: len(self.input_ids)], np.float32))
        chosen = []
        for index in range(logits.shape[1]):
            chosen.append(self._choose(logits[:, index].clone()))
            if not self.unfinished.any() or index == drafted.shape[1]:
                break
            if (torch.from_numpy(drafted[:, index]) != chosen[-1])[self._talking()].any():
                break
        return chosen

    def _talking(self):
        """bool [batch]: rows whose tokens are their own; without an eos HF pads none of those that met a criterion."""
        return self.unfinished if self.has_eos else torch.ones_like(self.unfinished)

    def _choose(self, logits):
        """One column of HF's loop."""
        raw = logits.clone() if self.keep_logits else None
        scores = self.processors(self.input_ids, logits)
        if self.do_sample:
            probs = torch.nn.functional.softmax(scores, dim=-1)
            tokens = torch.multinomial(probs, num_samples=1, generator=self.generator).squeeze(1)
        else:
            tokens = torch.argmax(scores, dim=-1)
        if self.keep_logits:
            self.logits += (raw,)
        if self.keep_scores:
            self.scores += (scores,)
        if self.has_eos:
            tokens = torch.where(self.unfinished, tokens, self.pad_id)
        self.input_ids = torch.cat([self.input_ids, tokens[:, None]], dim=1)
        if self.streamer is not None:
            self.streamer.put(tokens)
        self.unfinished &= ~self.criteria(self.input_ids, self.scores or None).cpu()
        return tokens

    def _commit(self, state, columns):
        """Move the clock over the chosen columns."""
        width = max(self.engine.block_size, 1)
        tokens = np.zeros((state.finished.shape[0], width), np.int32)
        tokens[: len(self.input_ids), : len(columns)] = torch.stack(columns, dim=1).numpy()
        count = np.full(len(tokens), len(columns) - 1, np.int32)
        return self.engine.commit(state, *jax.device_put((count, tokens)))


def _count(counts, active, committed, drafted):
    for row in torch.nonzero(active).flatten().tolist():
        counts[0][row] += 1
        counts[1][row] += drafted
        counts[2][row].append(committed - 1)
