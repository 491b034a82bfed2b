"""The schedule of a benchmark: warm-up, then every method on every batch in shuffled order, then memory and traces."""

import dataclasses
import random
import time

from .environment import compile_clock, peak_memory
from .exactness import compare
from .methods import Budget

_WARM_TOKENS = 8


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to measure.

    Fields:
        prompts: prompt set's name -> list of prompts, each a list of ids.
        budget: how far to generate.
        batch_sizes: prompts per call; sets are cut into full batches.
        repeats: timed calls of each method on each batch.
        seed: of the order of methods.
        reference: label of the method whose tokens are the expected ones.
    """

    prompts: dict
    budget: Budget
    batch_sizes: tuple
    repeats: int
    seed: int
    reference: str


def run(methods, plan, gap, on_step=lambda done, total, what: None):
    """Measure.

    Args:
        methods: list of `methods.Compiled`, `HF`, `ZLab`; labels are unique.
        gap: `exactness.Top2Gap` for differing outputs, or None for sampled runs, which are not compared.
        on_step: called with (calls done, calls in all, what runs now).

    Returns:
        {'methods': label -> facts, 'runs': list of records, 'traces': set -> label -> events}.
    """
    jobs = [job for size in plan.batch_sizes for job in _batches(plan.prompts, size)]
    pairs = [(method, job) for job in jobs for method in methods if _takes(method, job)]
    progress = _Progress(on_step, len(pairs) * plan.repeats + _warm_ups(pairs, plan.budget) + len(methods))
    facts = {method.label: _warm_up(method, [job for m, job in pairs if m is method], plan, progress) for method in methods}
    runs, outputs, traces = _measure(methods, jobs, plan, progress)
    if gap is not None:
        _mark_differences(runs, outputs, {(j.name, j.size, j.index): j for j in jobs}, plan.reference, gap)
    for method in methods:
        progress.step(f"memory and trace of {method.label}", 1)
        own = [job for m, job in pairs if m is method]
        if own:
            facts[method.label]["peak_memory_bytes"] = peak_memory(lambda: method.run(own[0].prompts, plan.budget))
            _trace(method, [job for job in own if _is_first(job, plan)], plan.budget, traces)
    ordered = {name: {label: found[label] for label in facts if label in found} for name, found in traces.items()}
    return {"methods": facts, "runs": runs, "traces": ordered}


def _is_first(job, plan):
    """Whether tokens over time are shown for this batch: the first of each set."""
    return job.index == 0 and job.size == plan.batch_sizes[0]


def _trace(method, jobs, budget, traces):
    """Step by step runs of a method whose timed calls show no events, since its loop does not return in between."""
    for job in jobs:
        if method.label not in traces.setdefault(job.name, {}):
            method.trace(job.prompts, budget)  # compiles
            traces[job.name][method.label] = _events(method.trace(job.prompts, budget))


def _events(trace):
    return [[round(at, 5), total] for at, total in trace.events]


@dataclasses.dataclass(frozen=True)
class _Job:
    name: str
    size: int
    index: int
    prompts: list


def _batches(prompts, size):
    for name, rows in prompts.items():
        if size > len(rows):
            raise ValueError(f"batch_sizes: {size}, but {name} has {len(rows)} prompts; give more prompts or a smaller batch.")
        for index in range(len(rows) // size):
            yield _Job(name, size, index, rows[index * size : (index + 1) * size])


def _takes(method, job):
    return method.max_batch is None or job.size <= method.max_batch


class _Progress:
    def __init__(self, on_step, total):
        self.on_step, self.total, self.done = on_step, total, 0

    def step(self, what, count=1):
        self.on_step(self.done, self.total, what)
        self.done += count


def _shapes(method, jobs, budget):
    """One job for each set of compiled programs the method needs."""
    return list({method.shape_key(job.prompts, budget): job for job in jobs}.values())


def _warm_ups(pairs, budget):
    return sum(len(_shapes(m, [j for n, j in pairs if n is m], budget)) for m in {id(m): m for m, _ in pairs}.values())


def _warm_up(method, jobs, plan, progress):
    """Compile and run everything the method will need; what that took beyond running is its compile time."""
    facts = {"method": method.name, "block_size": method.block_size}
    start = time.perf_counter()
    with compile_clock() as spent:
        for job in _shapes(method, jobs, plan.budget):
            progress.step(f"warm-up of {method.label}")
            compiled = hasattr(method, "engine")  # a compiled loop's programs depend on the budget, eager code does not
            budget = plan.budget if compiled else dataclasses.replace(plan.budget, max_new_tokens=_WARM_TOKENS)
            method.run(job.prompts, budget)
    facts["warm_up_seconds"] = round(time.perf_counter() - start, 3)
    facts["compile_seconds"] = round(spent["trace"] + spent["lower"] + spent["compile"], 3)
    facts["programs"] = spent["programs"]
    return facts


def _measure(methods, jobs, plan, progress):
    """All timed calls; methods take turns in an order drawn anew for every batch and repeat, so that drift hits all alike."""
    order, runs, outputs, traces = random.Random(plan.seed), [], {}, {}
    for repeat in range(plan.repeats):
        for job in jobs:
            turn = [method for method in methods if _takes(method, job)]
            order.shuffle(turn)
            for place, method in enumerate(turn):
                progress.step(f"{job.name} {job.index + 1}: {method.label}")
                budget = dataclasses.replace(plan.budget, seed=plan.budget.seed + repeat)
                with compile_clock() as spent:
                    trace = method.run(job.prompts, budget)
                if trace.events and repeat == 0 and _is_first(job, plan):
                    traces.setdefault(job.name, {})[method.label] = _events(trace)
                outputs[method.label, job.name, job.size, job.index, repeat] = trace.tokens
                runs.append({"repeat": repeat, "order": place, **_record(job, method, trace, spent["programs"])})
    return runs, outputs, traces


def _record(job, method, trace, programs):
    """A timed call as it stands in the JSON."""
    return {
        "set": job.name,
        "batch_size": job.size,
        "batch": job.index,
        "method": method.label,
        "prompt_tokens": [len(prompt) for prompt in job.prompts],
        "new_tokens": [len(row) for row in trace.tokens],
        "ttft_seconds": round(trace.ttft_seconds, 6),
        "decode_seconds": round(trace.decode_seconds, 6),
        "programs_compiled": programs,
        "committed": trace.committed,
    }


def _mark_differences(runs, outputs, jobs, reference, gap):
    for record in runs:
        where = record["set"], record["batch_size"], record["batch"], record["repeat"]
        expected = outputs.get((reference, *where))
        record["differences"] = (
            None if expected is None else compare(jobs[where[:3]].prompts, expected, outputs[record["method"], *where], gap)
        )
