"""What longer blocks would bring, from measured acceptance by position.

A row `a[0..B-1]` says which share of steps commits the token at each position; `a[0]` is the anchor, 1. A draft with
that row has tau(K) = a[0] + .. + a[K-1]. Beyond B nothing was measured, so two tails bracket it: `last` goes on with
the mean ratio of the last positions, `constant` with the one ratio that gives the same tau over the whole row.
"""

import json
import math
import os
from pathlib import Path

from .summary import constant_acceptance

PUBLISHED = Path(__file__).parent / "data" / "v5p_qwen3_4b.json"
BLOCK_SIZES = (2, 4, 8, 16, 32, 64, 128)
_TAIL_POSITIONS = 5  # positions that the `last` tail is fitted to
_RAISE = 0.05
_EDGE = 0.9999  # a ratio of 1 would promise an endless block


def published():
    """(tasks: name -> row, source) of the published v5p rows that ship with the package."""
    data = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    return {name: task["acceptance_by_position"] for name, task in data["tasks"].items()}, data["source"]


def from_benchmark(document, label=None):
    """(tasks, source) of a benchmark's document.

    Args:
        label: the method whose rows are taken; None takes the document's main method.

    Raises:
        ValueError: not such a document, or the method has no acceptance by position.
    """
    try:
        label = label or document["settings"]["main_method"]
        rows = {
            name: next(iter(sizes.values())).get(label, {}).get("acceptance_by_position")
            for name, sizes in document["summary"].items()
        }
        source = f"benchmark of {document['environment']['date']}, {label}, {document['settings']['target']}"
    except (KeyError, TypeError, AttributeError, StopIteration):
        raise ValueError("benchmark: not a JSON document of `dflash-torchax benchmark`; make one with its --output.") from None
    rows = {name: row for name, row in rows.items() if row and len(row) > 1}
    if not rows:
        raise ValueError(f"method: {label!r} has no acceptance by position in this benchmark; choose a drafting method it ran.")
    return rows, source


def tails(row):
    """name -> ratio of each position's share to the one before, beyond the measured positions."""
    count = min(_TAIL_POSITIONS, len(row) - 1)
    last = (row[-1] / row[-1 - count]) ** (1 / count) if row[-1] > 0 else 0.0
    return {"last": min(last, _EDGE), "constant": min(constant_acceptance(math.fsum(row), len(row)), _EDGE)}


def expected_tau(row, block_size, ratio):
    """tau of blocks of `block_size` slots (math.inf: the limit), continuing the row by `ratio` where it ends."""
    if block_size <= len(row):
        return math.fsum(row[:block_size])
    if ratio >= 1:
        raise ValueError(f"ratio: {ratio}; beyond the measured positions it must be below 1.")
    more = 1.0 if block_size == math.inf else 1 - ratio ** (block_size - len(row))
    return math.fsum(row) + row[-1] * ratio * more / (1 - ratio)


def raised(row, by=_RAISE):
    """The row of a draft whose chance to be right, given that all before were, is higher by `by` at each position."""
    out = [row[0]]
    for before, share in zip(row, row[1:], strict=False):
        out.append(out[-1] * min((share / before if before > 0 else 0.0) + by, 1.0))
    return out


def study(tasks, source, cost=None):
    """The whole study as a JSON document.

    Args:
        tasks: name -> acceptance by position.
        source: where the rows are from.
        cost: width -> milliseconds of a step of that width, or None.

    Raises:
        ValueError: a row that is not one, or a cost table without width 1.
    """
    for name, row in tasks.items():
        if not row or abs(row[0] - 1) > 1e-6 or any(b > a + 1e-6 or b < 0 for a, b in zip(row, row[1:], strict=False)):
            raise ValueError(f"acceptance_by_position of {name}: must start with 1 and never rise, got {row}.")
    done = [_task(name, row, cost) for name, row in tasks.items()]
    return {
        "kind": "scaling",
        "source": source,
        "block_sizes": list(BLOCK_SIZES),
        "cost_ms_by_width": cost,
        "tasks": sorted(done, key=lambda task: -task["tail_ratio"]["constant"]),
        "statements": _statements(done),
    }


def _task(name, row, cost):
    ratios, size = tails(row), len(row)
    limits = {tail: expected_tau(row, math.inf, ratio) for tail, ratio in ratios.items()}
    better = raised(row)
    task = {
        "name": name,
        "tau": math.fsum(row),
        "measured_positions": size,
        "acceptance_by_position": list(row),
        "tail_ratio": ratios,
        "expected_tau": [expected_tau(row, k, ratios["last"]) for k in BLOCK_SIZES],
        "expected_tau_constant": [expected_tau(row, k, ratios["constant"]) for k in BLOCK_SIZES],
        "limit": limits,
        "share_of_limit_at_16": {tail: expected_tau(row, 16, ratios[tail]) / limit for tail, limit in limits.items()},
        "gain_16_to_128": {tail: expected_tau(row, 128, ratio) - expected_tau(row, 16, ratio) for tail, ratio in ratios.items()},
        "gain_of_raising": math.fsum(better) - math.fsum(row),
        "gain_of_doubling": {tail: expected_tau(row, 2 * size, ratio) - math.fsum(row) for tail, ratio in ratios.items()},
    }
    if cost:
        task["best"] = best_block_size(row, ratios["last"], cost)
    return _rounded(task)


def _statements(tasks):
    """The claims made about block sizes, each with the tasks for which it holds, fails, or hangs on the tail."""
    claims = {
        "16 slots reach over 90 % of the limit": lambda task, tail: task["share_of_limit_at_16"][tail] > 0.9,
        "128 slots add less than one token to 16": lambda task, tail: task["gain_16_to_128"][tail] < 1,
        "0.05 more acceptance per position gains more than doubling the block": lambda task, tail: (
            task["gain_of_raising"] > task["gain_of_doubling"][tail]
        ),
    }
    out = []
    for text, holds in claims.items():
        verdicts = {task["name"]: {holds(task, tail) for tail in ("last", "constant")} for task in tasks}
        out.append(
            {
                "statement": text,
                "holds": [name for name, verdict in verdicts.items() if verdict == {True}],
                "fails": [name for name, verdict in verdicts.items() if verdict == {False}],
                "depends_on_tail": [name for name, verdict in verdicts.items() if len(verdict) == 2],
            }
        )
    return out


def best_block_size(row, ratio, cost):
    """The block size with the least time per token: {'block_size', 'ms_per_token', 'speedup'}.

    Args:
        cost: width -> ms of a step; widths between two given ones are interpolated, none beyond the widest is tried.
    """
    if 1 not in cost:
        raise ValueError(f"cost: widths {sorted(cost)} lack width 1, the plain step that speedups refer to.")
    times = {k: step_cost(cost, k) / expected_tau(row, k, ratio) for k in range(1, max(cost) + 1)}
    best = min(times, key=times.get)
    return {"block_size": best, "ms_per_token": times[best], "speedup": times[1] / times[best]}


def step_cost(cost, width):
    """Milliseconds of a step of `width`, interpolated between the table's widths."""
    below, above = max(k for k in cost if k <= width), min(k for k in cost if k >= width)
    if below == above:
        return cost[below]
    return cost[below] + (cost[above] - cost[below]) * (width - below) / (above - below)


def parse_cost(text):
    """A cost table from '1=25.5,8=46.6' or from a JSON file of `study k-flat` or {"width": ms, ...}.

    Raises:
        ValueError, FileNotFoundError: neither.
    """
    explain = "cost: give WIDTH=MS,WIDTH=MS,... or a JSON file of `dflash-torchax study k-flat`"
    path = Path(os.path.expanduser(text))
    if "=" in text and not os.path.isfile(path):  # Path.is_file raises for a long table
        try:
            return _checked({int(width): float(ms) for width, ms in (pair.split("=") for pair in text.split(","))}, explain)
        except ValueError:
            raise ValueError(f"{explain}; got {text!r}.") from None
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{explain}; {text} is not a file.")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if "rows" in data:  # measured where it was, else what a TPU's compiler estimates
            table = {row["width"]: row["ms"] if "ms" in row else row["estimated_ms"] for row in data["rows"]}
        else:
            table = data
        return _checked({int(width): float(ms) for width, ms in table.items()}, explain)
    except (json.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError):
        raise ValueError(f"{explain}; {path} holds no table of milliseconds by width.") from None


def _checked(table, explain):
    if not table or min(table) < 1 or min(table.values()) <= 0:
        raise ValueError(explain)
    return dict(sorted(table.items()))


def _rounded(value):
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def tables(document):
    """Yield (title, columns, rows of texts); two figures with '..' are the two tails."""
    rows = [
        [task["name"], *(f"{tau:.2f}" for tau in task["expected_tau"]), _both(task["limit"], ".1f")] for task in document["tasks"]
    ]
    yield "Expected tau by block size", ["task", *map(str, document["block_sizes"]), "limit"], rows
    columns = ["task", "tau", "16 of the limit", "128 adds to 16", "+0.05 acceptance adds", "doubling adds"]
    rows = [
        [
            task["name"],
            f"{task['tau']:.2f}",
            _both(task["share_of_limit_at_16"], ".0%"),
            _both(task["gain_16_to_128"], ".2f"),
            f"{task['gain_of_raising']:.2f}",
            _both(task["gain_of_doubling"], ".2f"),
        ]
        for task in document["tasks"]
    ]
    if document["cost_ms_by_width"]:
        columns.append("best block (speedup)")
        for row, task in zip(rows, document["tasks"], strict=True):
            row.append(f"{task['best']['block_size']} ({task['best']['speedup']:.2f}x)")
    yield "What changes tau", columns, rows


def _both(values, form):
    low, high = sorted((format(values["last"], form), format(values["constant"], form)), key=lambda text: float(text.rstrip("%")))
    return low if low == high else f"{low}..{high}"


def sentences(document):
    """The statements and the order of tasks as sentences."""
    for item in document["statements"]:
        parts = [
            f"{word} for {', '.join(item[key])}"
            for key, word in (("holds", "holds"), ("fails", "does not hold"), ("depends_on_tail", "hangs on the tail"))
            if item[key]
        ]
        yield f"{item['statement']}: {'; '.join(parts)}."
    count = len(document["tasks"])
    mean = {
        field: {tail: math.fsum(task[field][tail] for task in document["tasks"]) / count for tail in ("last", "constant")}
        for field in ("share_of_limit_at_16", "gain_16_to_128")
    }
    yield (
        f"Mean over the tasks: 16 slots reach {_both(mean['share_of_limit_at_16'], '.0%')} of the limit, "
        f"128 add {_both(mean['gain_16_to_128'], '.2f')}."
    )
    yield (
        "Tasks by decay of acceptance, slowest first: "
        + ", ".join(f"{task['name']} ({task['tail_ratio']['constant']:.2f} a position)" for task in document["tasks"])
        + "."
    )
