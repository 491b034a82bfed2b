"""Verify cost by width: measured on the device at hand, and as the compiler of a TPU estimates it."""

import statistics
import time

import jax
import numpy as np

from ..engine import Engine, Request
from ..sampling import greedy
from . import report as reports
from .programs import Compiler, Shape
from .topology import chip_of, mesh_of

WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128)


def measure(model, widths=WIDTHS, context=256, repeats=9):
    """Median ms of verifying `width` tokens on the default device, each run blocked on.

    Args:
        model: HF model with weights.
        context: tokens already in the cache.
        repeats: rounds; each round runs every width once, so that a busy moment hits all of them.

    Returns:
        list of {"width", "ms", "ms_min", "ms_max"}.
    """
    engine = Engine(model)
    state = engine.start(_request(model, context, max(widths)))

    def verify(params, state, drafted):
        state, logits = engine.decoder.verify(params, state, drafted)
        return state, greedy(logits)

    verify = jax.jit(verify, donate_argnums=1)  # the state goes round, as in the loop: no cache is copied
    drafts = {width: jax.device_put(np.ones((1, width - 1), np.int32)) for width in widths}
    for drafted in drafts.values():
        state, ids = verify(engine.params, state, drafted)  # compiles
        ids.block_until_ready()
    times = {width: [] for width in widths}
    for _ in range(repeats):
        for width, drafted in drafts.items():
            begin = time.perf_counter()
            state, ids = verify(engine.params, state, drafted)
            ids.block_until_ready()
            times[width].append((time.perf_counter() - begin) * 1e3)
    return [{"width": w, "ms": statistics.median(t), "ms_min": min(t), "ms_max": max(t)} for w, t in times.items()]


def _request(model, context, widest):
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit is not None and context + widest > limit:
        raise ValueError(f"context: {context} and a width of {widest} exceed the model's {limit} positions; lower one of them.")
    prompt = np.ones((1, context), np.int32)
    return Request(prompt, np.array([context], np.int32), np.array([context + widest], np.int32), ())


def estimate(target, topology, widths=WIDTHS, context=2048, tp=1, batch=1, cache="auto", progress=lambda name: None):
    """The compiler's ms by width for `target` on meta, next to the chip's roofline.

    Returns:
        list of {"width", "estimated_ms", "roofline_ms"}; the roofline is the longer of reading weights and caches once
        and of multiplying at peak.
    """
    chip = chip_of(topology)
    compiler = Compiler(target, None, mesh_of(topology, tp), Shape(batch, context), cache, reports.COUNT_BYTES_ONCE)
    target_bytes, _ = reports.context_bytes_per_token(compiler.plain, batch)
    rows = []
    for width in widths:
        progress(f"verify {width}")
        report = reports.report_of(compiler.verify(width), chip, target_bytes * context)
        rows.append({"width": width, "estimated_ms": report.estimated_ms, "roofline_ms": report.roofline_ms})
    return rows


def flat_up_to(rows, key, slack=1.3):
    """The widest width up to which `key` stays within `slack` times its value at the smallest width."""
    rows = [row for row in rows if row.get(key) is not None]
    widest = None
    for row in rows:
        if row[key] > slack * rows[0][key]:
            break
        widest = row["width"]
    return widest
