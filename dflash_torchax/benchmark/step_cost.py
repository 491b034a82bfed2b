"""What a step costs against its parts measured alone: `python -m dflash_torchax.benchmark.step_cost`.

Every figure is the median over interleaved runs, each waiting for its result; the state goes round (donated, clock held
still), so that nothing is copied that a real loop would not copy.
"""

import argparse
import dataclasses
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from ..attention import AttentionView
from ..embedded import load_embedded
from ..engine import Engine, Request
from ..sampling import greedy


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m dflash_torchax.benchmark.step_cost", description=__doc__)
    parser.add_argument("--context", type=int, default=96, help="prompt tokens; default: %(default)s")
    parser.add_argument("--repeats", type=int, default=31, help="default: %(default)s")
    args = parser.parse_args(argv)
    model, draft, _ = load_embedded()
    milliseconds = measure(Engine(model, draft), Engine(model), args.context, args.repeats)
    Console().print(table_of(milliseconds))


def measure(engine, plain, context, repeats):
    """name -> median milliseconds of the steps and of their parts."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(10, engine.decoder.target.vocab_size, (1, context)).astype(np.int32)
    request = Request(prompt, np.array([context], np.int32), np.array([context + 64], np.int32), ())
    runs = {
        "plain step": _step(plain, request),
        "DFlash step": _step(engine, request),
        **{f"target forward, width {w}": _forward(engine, request, w) for w in (1, engine.block_size)},
        **{f"head and argmax, width {w}": _head(engine, w, _target_logits) for w in (1, engine.block_size)},
        f"draft head and argmax, width {engine.block_size - 1}": _head(engine, engine.block_size - 1, _draft_logits),
        "draft forward": _draft(engine, request),
        "inject_context": _inject(engine, request),
    }
    seconds = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: 1e3 * statistics.median(values) for name, values in seconds.items()}


def table_of(milliseconds):
    """Rich table: the parts, their sum, the step against both."""
    table = Table(title="medians, batch 1")
    for column, justify in (("what", "left"), ("ms", "right")):
        table.add_column(column, justify=justify)
    for name, value in milliseconds.items():
        table.add_row(name, f"{value:.1f}")
    parts = [v for k, v in milliseconds.items() if "step" not in k and not k.endswith("width 1")]
    step = milliseconds["DFlash step"]
    table.add_section()
    table.add_row("sum of the DFlash step's parts", f"{sum(parts):.1f}")
    table.add_row("DFlash step / sum of its parts", f"{step / sum(parts):.2f}")
    table.add_row("DFlash step / plain step", f"{step / milliseconds['plain step']:.2f}")
    return table


def _round_trip(program, params, state):
    """A run that donates the state to `program` and takes it back for the next one."""
    compiled = jax.jit(program, donate_argnums=1)
    holder = [state]

    def run():
        result, holder[0] = compiled(params, holder[0])
        jax.block_until_ready((result, holder[0]))

    return run


def _step(engine, request):
    def program(params, state):
        after = engine.decoder.step(params, state)
        still = {name: getattr(state, name) for name in ("lengths", "finished", "num_steps")}
        return after.lengths, dataclasses.replace(after, **still)

    return _round_trip(program, engine.params, engine.start(request))


def _forward(engine, request, width):
    taps = engine.decoder.proposer.taps if width > 1 else ()

    def program(params, state):
        view = AttentionView(state.target_cache, state.starts, state.positions(width))
        output = engine.decoder.target.forward(params.target, jnp.ones((1, width), jnp.int32), view, taps)
        return (output.hidden, output.feature), dataclasses.replace(state, target_cache=output.cache)

    return _round_trip(program, engine.params, engine.start(request))


def _head(engine, width, logits):
    target = engine.decoder.target
    hidden = jax.random.normal(jax.random.key(0), (1, width, target.hidden_size), target.dtype)
    compiled = jax.jit(lambda params, hidden: greedy(logits(engine.decoder, params, hidden)))
    return lambda: compiled(engine.params, hidden).block_until_ready()


def _target_logits(decoder, params, hidden):
    return decoder.target.head(params.target, hidden)


def _draft_logits(decoder, params, hidden):
    return decoder.proposer.logits(params.draft, params.target, hidden)


def _draft(engine, request):
    def program(params, state):
        hidden, cache = engine.decoder.proposer.denoise(params.draft, params.target, state)
        return hidden, dataclasses.replace(state, draft_cache=cache)

    return _round_trip(program, engine.params, engine.start(request))


def _inject(engine, request):
    proposer, width = engine.decoder.proposer, engine.block_size
    feature = jnp.ones((1, width, len(proposer.taps) * engine.decoder.target.hidden_size), engine.decoder.target.dtype)

    def program(params, state):
        cache = proposer.inject(params.draft, state.draft_cache, feature, state.starts, state.positions(width))
        return state.lengths + 0, dataclasses.replace(state, draft_cache=cache)

    return _round_trip(program, engine.params, engine.start(request))


if __name__ == "__main__":
    main()
