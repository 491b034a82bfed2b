"""`block_size="auto"`: the width that makes most tokens per second, from acceptance seen and step cost measured.

The output never depends on it: every width commits the target's own tokens. Width 1 is plain decoding that keeps the
draft's context up to date, so that drafting can come back.
"""

import dataclasses
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .engine import Committed, Engine
from .proposers import DFlash

_MEASURE_STEPS = 3  # steps that time a width the first time
_SEGMENT_STEPS = 16  # steps between two looks
_PLAIN_BEFORE_PROBE = 48  # plain steps until drafting gets another try
_MEMORY = 0.8  # weight of what was known when a segment adds to it


class Report(NamedTuple):
    """What a segment did: iterations, row steps, and how many of these accepted at least k = 1, 2, ... drafts."""

    iterations: object
    row_steps: object
    tally: object
    finished: object


class BlockChooser:
    """Picks the next width. Plain Python; knows nothing of models.

    Args:
        widths: ascending block sizes to choose from, 1 among them.
    """

    def __init__(self, widths):
        self.widths = tuple(widths)
        self.costs = {width: [] for width in self.widths}
        self.hits, self.tries = np.zeros(self.widths[-1] - 1), np.zeros(self.widths[-1] - 1)
        self.plain_steps = 0

    def next(self):
        """(width, number of steps) to run now."""
        for width in reversed(self.widths):
            if not self.costs[width]:
                return width, _MEASURE_STEPS
        if self.plain_steps >= _PLAIN_BEFORE_PROBE:
            return self.widths[-1], 1
        return max(self.widths, key=self.rate), _SEGMENT_STEPS

    def record(self, width, seconds, report):
        """Take in a segment of `report.iterations` steps that took `seconds`."""
        if not report.iterations:
            return
        self.costs[width] = [*self.costs[width][-6:], seconds / int(report.iterations)]
        self.plain_steps = self.plain_steps + int(report.iterations) if width == 1 else 0
        seen = slice(0, width - 1)
        self.hits[seen] = _MEMORY * self.hits[seen] + report.tally[seen]
        self.tries[seen] = _MEMORY * self.tries[seen] + report.row_steps

    def tokens(self, width):
        """Expected tokens per step: the bonus and the drafts that will stand."""
        return 1 + float((self.hits / np.maximum(self.tries, 1))[: width - 1].sum())

    def rate(self, width):
        """Expected tokens per second."""
        return self.tokens(width) / float(np.median(self.costs[width]))


class AutoEngine(Engine):
    """An `Engine` that changes its block size while it generates. Arguments as `Engine`, without block_size."""

    def __init__(self, model, draft, **options):
        if not hasattr(draft, "denoise"):
            raise ValueError("block_size: 'auto' needs a DFlash draft; pass draft=load_draft(...).")
        super().__init__(model, draft, **options)
        full, widths = self.block_size, [1]
        while widths[-1] < full:
            widths.append(min(widths[-1] * 2, full))
        proposers = {w: DFlash(draft, self.decoder.target, w, params=self.params.draft) for w in widths}
        self.decoders = {w: dataclasses.replace(self.decoder, proposer=p) for w, p in proposers.items()}
        self.segments = {w: jax.jit(self._segment(d), donate_argnums=1) for w, d in self.decoders.items()}
        self.choosers = {}  # (batch, slots) -> BlockChooser: cost depends on both

    @staticmethod
    def _default_draft_sampling(proposer):
        return "greedy"  # widths are chosen by the clock on the wall: the text must not depend on them

    def run(self, request):
        chooser, state = self._chooser_for(self.start(request))
        finished = bool(jax.device_get(state.finished.all()))
        while not finished:
            state, report = self._timed(chooser, state, *chooser.next())
            finished = bool(report.finished)
        return self.finish(state, request)

    def stream(self, request):
        chooser, state = self._chooser_for(self.start(request))
        rows = len(request.lengths)
        before = np.array(request.lengths)
        while True:
            tokens, lengths, finished = (x[:rows] for x in jax.device_get((state.tokens, state.lengths, state.finished)))
            counts = lengths - before
            index = np.minimum(before[:, None] + np.arange(max(int(counts.max()), 1)), tokens.shape[1] - 1)
            stop = yield Committed(np.take_along_axis(tokens, index, axis=1), counts, finished)
            before = lengths
            if stop is not None and stop.any():
                state = self.stop_rows(state, jax.device_put(np.pad(stop, (0, state.finished.shape[0] - rows))))
            if (finished if stop is None else finished | stop).all():
                break
            state, _ = self._timed(chooser, state, chooser.next()[0], 1)
        yield self.finish(state, request)

    def _chooser_for(self, state):
        """(the chooser of this batch and cache size, the state); a new one has its programs compiled by zero steps."""
        key = state.tokens.shape
        if key not in self.choosers:
            for segment in self.segments.values():
                state, _ = segment(self.params, state, jax.device_put(np.int32(0)))
            self.choosers[key] = BlockChooser(self.decoders)
        return self.choosers[key], state

    def _timed(self, chooser, state, width, steps):
        start = time.perf_counter()
        state, report = self.segments[width](self.params, state, jax.device_put(np.int32(steps)))
        report = jax.device_get(report)
        chooser.record(width, time.perf_counter() - start, report)
        return state, report

    def _segment(self, decoder):
        """A program that runs at most `steps` steps of one width."""
        slots = jnp.arange(1, self.block_size)

        def advance(params, carry):
            state, report = carry
            after = decoder.step(params, state)
            accepted = (after.lengths - state.lengths - 1)[:, None]
            tally = ((accepted >= slots) & ~state.finished[:, None]).sum(0)
            running = (~state.finished).sum()
            return after, Report(report.iterations + 1, report.row_steps + running, report.tally + tally, after.finished.all())

        def segment(params, state, steps):
            zero = jnp.zeros((), jnp.int32)
            report = Report(zero, zero, jnp.zeros(self.block_size - 1, jnp.int32), state.finished.all())
            going = lambda carry: ~carry[1].finished & (carry[1].iterations < steps)
            return jax.lax.while_loop(going, lambda carry: advance(params, carry), (state, report))

        return segment
