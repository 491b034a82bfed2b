"""From raw records to figures. Pure: the same records give the same figures, so tables can be checked against JSON."""

import itertools
import math
import statistics

DEFINITIONS = {
    "ms_per_token": "median over prompts of the time after the first token, divided by the tokens after it",
    "tokens_per_second": "all new tokens divided by all time, prefill included",
    "ttft_ms": "median time from the call to the first token on the host",
    "speedup": "ms/token of the baseline divided by the method's on the same prompt: median over prompts, lowest and highest",
    "tau": "acceptance length: tokens committed per step, the bonus token included, cut at eos and at the length limit; "
    "mean over all steps after the first token",
    "acceptance_rate": "accepted draft tokens divided by the draft tokens that could have been committed",
    "acceptance_by_position": "share of steps that committed the draft token at each position; position 0 is the anchor, "
    "so the sum of the row is tau",
    "exact": "prompts whose tokens all equal the reference's, of prompts compared",
    "peak_memory_bytes": "growth of the process (CPU) or peak of the device over one untimed call for each method, "
    "on its first batch",
    "compile_seconds": "tracing, lowering and compiling in the warm-up; not part of any other figure",
}


def summarise(result, baseline, max_new_tokens):
    """set -> batch size (as text) -> label -> figures.

    Args:
        result: what `schedule.run` returned.
        baseline: label that speedups refer to.
        max_new_tokens: the run's limit, for the acceptance rate.
    """

    def key(record):
        return record["set"], record["batch_size"]

    summary = {}
    for (name, size), group in itertools.groupby(sorted(result["runs"], key=key), key=key):
        records = list(group)
        times = {label: _ms_per_token(records, label) for label in result["methods"]}
        rows = {
            label: _figures(records, label, times, baseline, result["methods"][label], max_new_tokens)
            for label in result["methods"]
            if any(r["method"] == label for r in records)
        }
        summary.setdefault(name, {})[str(size)] = rows
    return summary


def _ms_per_token(records, label):
    """batch index -> median over repeats of ms per token after the first; batches that ended at once are left out."""
    found = {}
    for record in records:
        later = sum(record["new_tokens"]) - len(record["new_tokens"])
        if record["method"] == label and later > 0:
            found.setdefault(record["batch"], []).append(1e3 * record["decode_seconds"] / later)
    return {batch: statistics.median(values) for batch, values in found.items()}


def _figures(records, label, times, baseline, facts, max_new_tokens):
    own = [record for record in records if record["method"] == label]
    ratios = [times[baseline][batch] / ms for batch, ms in times[label].items() if batch in times.get(baseline, {})]
    seconds = sum(record["ttft_seconds"] + record["decode_seconds"] for record in own)
    figures = {
        "ms_per_token": _median(times[label].values()),
        "tokens_per_second": sum(sum(record["new_tokens"]) for record in own) / seconds,
        "ttft_ms": 1e3 * statistics.median(record["ttft_seconds"] for record in own),
        "speedup": _median(ratios),
        "speedup_low": min(ratios, default=None),
        "speedup_high": max(ratios, default=None),
        "prompts": len({record["batch"] for record in own}) * own[0]["batch_size"],
    }
    figures |= _acceptance(own, facts["block_size"], max_new_tokens) | _exactness(own)
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}


def _acceptance(own, block_size, max_new_tokens):
    """tau and its parts from the tokens committed by each step."""
    if block_size is None or any(record["committed"] is None for record in own):
        return {}
    rows = [row for record in own for row in record["committed"]]
    steps = [committed for row in rows for committed in row]
    if not steps:
        return {}
    drafted = sum(_drafted(row, block_size, max_new_tokens) for row in rows)
    by_position = [sum(n > position for n in steps) / len(steps) for position in range(max(block_size, *steps))]
    return {
        "tau": sum(steps) / len(steps),
        "steps": len(steps),
        "acceptance_rate": (sum(steps) - len(steps)) / drafted if drafted else 0.0,
        "acceptance_by_position": [round(share, 4) for share in by_position],
    }


def _drafted(row, block_size, max_new_tokens):
    """Draft tokens that could have been committed by a row's steps: a block is cut at the length limit."""
    drafted, length = 0, 1
    for committed in row:
        drafted += max(min(block_size, max_new_tokens - length) - 1, 0)
        length += committed
    return drafted


def _exactness(own):
    compared = [difference for record in own if record.get("differences") is not None for difference in record["differences"]]
    if not compared:
        return {}
    different = [difference for difference in compared if difference is not None]
    figures = {"exact": f"{len(compared) - len(different)}/{len(compared)}"}
    if different:
        figures["first_difference"] = min(different, key=lambda difference: difference["position"])
    return figures


def _median(values):
    values = list(values)
    return statistics.median(values) if values else None


def decay_order(summary, label):
    """Sets ordered from slow to fast decay of acceptance: [(set, tau, constant acceptance with the same tau)]."""
    rows = []
    for name, sizes in summary.items():
        figures = next(iter(sizes.values())).get(label, {})
        if figures.get("acceptance_by_position"):
            shares = figures["acceptance_by_position"]
            rows.append((name, figures["tau"], round(constant_acceptance(sum(shares), len(shares)), 4)))
    return sorted(rows, key=lambda row: -row[2])


def constant_acceptance(tau, block_size):
    """The per-position acceptance rate a in 0..1 with 1 + a + ... + a^(block_size - 1) == tau."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        total = math.fsum(middle**k for k in range(block_size))
        low, high = (middle, high) if total < tau else (low, middle)
    return (low + high) / 2
