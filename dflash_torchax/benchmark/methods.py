"""The methods a benchmark compares, behind one call: prompts in, tokens and times out."""

import dataclasses
import time

import jax
import numpy as np
import torch

from ..engine import bucket
from ..generate import Generate


@dataclasses.dataclass
class Trace:
    """One measured call.

    Fields:
        tokens: per row, the new token ids, eos included.
        ttft_seconds: from the call to each row's first token, on the host.
        decode_seconds: from there to the last token.
        committed: per row, tokens committed by each step after the first token; None where the method hides it.
        events: (seconds since the call, new tokens so far over all rows); empty where nothing was observed.
    """

    tokens: list
    ttft_seconds: float
    decode_seconds: float
    committed: list | None = None
    events: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Budget:
    """How far to generate: new tokens per row, ids that end a row, temperature (0: greedy), seed."""

    max_new_tokens: int
    eos_ids: tuple
    temperature: float = 0.0
    seed: int = 0

    @property
    def pad_id(self):
        return self.eos_ids[0] if self.eos_ids else 0

    def options(self):
        """Keyword arguments of HF's generate; seeds torch where tokens are sampled."""
        chosen = {"do_sample": False}
        if self.temperature > 0:
            torch.manual_seed(self.seed)
            chosen = {"do_sample": True, "temperature": self.temperature, "top_k": 0, "top_p": 1.0}
        return {
            "max_new_tokens": self.max_new_tokens,
            "eos_token_id": list(self.eos_ids) or None,
            "pad_token_id": self.pad_id,
            **chosen,
        }


def left_padded(prompts, budget):
    """Lists of ids as HF takes a batch: int64 (ids, mask), padded on the left."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[budget.pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    return ids, torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])


def until_eos(ids, eos_ids):
    """`ids` up to and with the first eos."""
    for index, token in enumerate(ids):
        if token in eos_ids:
            return list(ids[: index + 1])
    return list(ids)


class Compiled:
    """Our compiled loop with some proposer (none: plain decoding)."""

    max_batch = None

    def __init__(self, name, model, engine, block_size=None):
        self.name, self.engine, self.block_size = name, engine, block_size
        self.generate = Generate(model, engine)  # beside the model, whose own generate stays HF's
        self.label = name if block_size is None else f"{name}-b{block_size}"

    def request(self, prompts, budget):
        """HF's own preparation of a call, as on an enabled model."""
        ids, mask = left_padded(prompts, budget)
        return self.generate.prepare(ids, attention_mask=mask, **budget.options()).request

    def shape_key(self, prompts, budget):
        """Calls with equal keys run the same compiled programs."""
        request = self.request(prompts, budget)
        return len(prompts), bucket(request.prompt.shape[1], 1), self.engine.slots_for(request)

    def run(self, prompts, budget):
        start = time.perf_counter()
        request = self.request(prompts, budget)
        state = jax.block_until_ready(self.engine.start(request))
        first = time.perf_counter()
        state = jax.block_until_ready(self.engine.decode_loop(self.engine.params, state))
        generation = self.engine.finish(state, request)
        return self._trace(request, generation, first - start, time.perf_counter() - first)

    def trace(self, prompts, budget):
        """Like `run`, step by step, so that events can be seen; the host reads after every step."""
        start, events, total = time.perf_counter(), [], 0
        request = self.request(prompts, budget)
        for item in self.engine.stream(request):
            if not hasattr(item, "counts"):
                return dataclasses.replace(self._trace(request, item, events[0][0], events[-1][0] - events[0][0]), events=events)
            total += int(np.sum(item.counts))
            events.append((time.perf_counter() - start, total))
        raise AssertionError("the stream ended without a Generation")

    def _trace(self, request, generation, ttft, decode):
        rows = zip(request.lengths, generation.lengths, generation.tokens, strict=True)
        tokens = [row[start:end].tolist() for start, end, row in rows]
        committed = [[accepted + 1 for accepted in row] for row in generation.stats.accepted_per_step]
        return Trace(tokens, ttft, decode, committed)


class _EventClock:
    """An HF streamer that notes when tokens arrive; the first thing HF puts is the prompt."""

    def __init__(self):
        self.started, self.events, self.counts = time.perf_counter(), [], None

    def put(self, value):
        if self.counts is None:
            self.counts = []
            return
        self.counts.append(value.numel())
        self.events.append((time.perf_counter() - self.started, sum(self.counts)))

    def end(self): ...


class HF:
    """transformers' own generate; with `block_size`, its prompt-lookup decoding."""

    def __init__(self, name, model, block_size=None):
        self.name, self.model, self.block_size = name, model, block_size
        self.label = name if block_size is None else f"{name}-b{block_size}"
        self.max_batch = None if block_size is None else 1

    def shape_key(self, prompts, budget):
        return len(prompts)

    def run(self, prompts, budget):
        ids, mask = left_padded(prompts, budget)
        lookup = {} if self.block_size is None else {"prompt_lookup_num_tokens": self.block_size - 1}
        clock = _EventClock()
        out = type(self.model).generate(self.model, ids, attention_mask=mask, streamer=clock, **lookup, **budget.options())
        end = time.perf_counter() - clock.started
        first = clock.events[0][0]
        committed = [clock.counts[1:]] if self.block_size is not None else None
        return Trace(
            [until_eos(row, budget.eos_ids) for row in out[:, ids.shape[1] :].tolist()], first, end - first, committed, clock.events
        )

    trace = run


def _only(vocabulary, compute_logits):
    """`compute_logits` with -inf for the ids outside `vocabulary`."""

    def within(hidden, output_head):
        logits = compute_logits(hidden, output_head)
        outside = torch.ones(logits.shape[-1], dtype=torch.bool).index_fill_(0, vocabulary, False)
        return logits.masked_fill_(outside, -torch.inf)

    return within


class ZLab:
    """z-lab's own loop, PyPI package `dflash`, on the same target module.

    It knows of no `vocabulary` (int64 [n], or None) of a draft: the other ids are taken out of its draft's logits, so that
    the pair that runs is the same.
    """

    name, max_batch = "zlab", 1

    def __init__(self, model, draft_path, block_size, vocabulary=None):
        try:
            from dflash import model as package
        except ImportError:
            raise ImportError("zlab: needs z-lab's package. Run: pip install --no-deps dflash==0.1.0") from None
        package._cuda_time = time.perf_counter  # its statistics call torch.cuda, which is not here
        self.package, self.model, self.block_size = package, model, block_size
        self.label = f"zlab-b{block_size}"
        self.draft = package.DFlashDraftModel.from_pretrained(draft_path, dtype=model.dtype, attn_implementation="sdpa").eval()
        if vocabulary is not None:
            self.draft.compute_logits = _only(vocabulary, self.draft.compute_logits)

    def shape_key(self, prompts, budget):
        return len(prompts)

    def run(self, prompts, budget):
        torch.manual_seed(budget.seed)
        forwards = []
        hook = self.model.register_forward_hook(lambda *_: forwards.append(time.perf_counter()))
        start = time.perf_counter()
        try:
            result = self.package.dflash_generate(
                self.draft,
                self.model,
                torch.tensor(prompts),
                budget.max_new_tokens,
                list(budget.eos_ids) or None,
                temperature=budget.temperature,
                block_size=self.block_size,
                return_stats=True,
            )
        finally:
            hook.remove()
        end = time.perf_counter() - start
        tokens = until_eos(result.output_ids[0, result.num_input_tokens :].tolist(), budget.eos_ids)
        totals = np.cumsum([1, *result.acceptance_lengths]).tolist()
        events = [(at - start, total) for at, total in zip(forwards, totals, strict=True)]
        first = result.time_to_first_token
        return Trace([tokens], first, end - first, [list(result.acceptance_lengths)], events)

    trace = run
