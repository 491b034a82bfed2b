"""Plots of a benchmark's document and of the scaling study, as image files."""

from pathlib import Path

# What savefig would write a date into, by suffix: equal data give equal files.
_UNDATED = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
_COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#8c8c8c")


def figure_of(width, height):
    """An empty figure of that size in inches, in the style of all plots; ImportError where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        raise ImportError("plots: matplotlib is missing. Run: pip install 'dflash_torchax[benchmark]'") from None
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "dflash_torchax"  # equal data give equal files
    matplotlib.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "font.size": 9})
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(figure, path):
    """Write a figure as a whole; returns its path."""
    from ..cli.output import replacing

    path = Path(path)
    with replacing(path) as scratch:
        figure.savefig(scratch, dpi=120, metadata=_UNDATED.get(path.suffix.lower()))
    return path


def benchmark(document, folder, suffix="svg"):
    """Write speedup.*, tau.*, positions.* and tokens.* into `folder`; returns the paths of those that have data."""
    folder = Path(folder)
    first = {name: next(iter(sizes.values())) for name, sizes in document["summary"].items()}
    made = [
        _bars(first, "speedup", f"speedup over {document['settings']['baseline']}", folder / f"speedup.{suffix}", spread=True),
        _bars(first, "tau", "tau (tokens per step)", folder / f"tau.{suffix}"),
        _positions(first, document["settings"].get("main_method"), folder / f"positions.{suffix}"),
        _tokens(document["traces"], folder / f"tokens.{suffix}"),
    ]
    return [path for path in made if path is not None]


def _bars(first, field, title, path, spread=False):
    """Grouped bars: a group per prompt set, a bar per method; whiskers from the lowest to the highest prompt."""
    labels = list(dict.fromkeys(label for rows in first.values() for label, row in rows.items() if row.get(field) is not None))
    if not labels:
        return None
    figure = figure_of(1.5 + 0.42 * len(labels) * len(first), 3.2)
    axes, width = figure.subplots(), 0.8 / len(labels)
    for place, label in enumerate(labels):
        groups = [(x, rows[label]) for x, rows in enumerate(first.values()) if rows.get(label, {}).get(field) is not None]
        xs = [x + (place - (len(labels) - 1) / 2) * width for x, _ in groups]
        heights = [row[field] for _, row in groups]
        errors = [[row[field] - row["speedup_low"] for _, row in groups], [row["speedup_high"] - row[field] for _, row in groups]]
        axes.bar(
            xs,
            heights,
            0.92 * width,
            label=label,
            color=_COLOURS[place % len(_COLOURS)],
            yerr=errors if spread else None,
            ecolor="#555555",
            capsize=2,
        )
        for x, height in zip(xs, heights, strict=True):
            side = "left" if spread else "center"  # beside the whisker
            axes.annotate(f"{height:.2f}", (x, height), (0, 2), textcoords="offset points", ha=side, fontsize=6)
    axes.set_xticks(range(len(first)), list(first))
    axes.set_title(title, loc="left")
    axes.legend(fontsize=7, frameon=False, ncols=2, loc="upper left", bbox_to_anchor=(0, -0.1))
    return save(figure, path)


def _positions(first, label, path):
    """Acceptance by position of one method, a line per prompt set."""
    rows = {
        name: methods[label]["acceptance_by_position"]
        for name, methods in first.items()
        if methods.get(label, {}).get("acceptance_by_position")
    }
    if not rows:
        return None
    figure = figure_of(4.8, 3.2)
    axes = figure.subplots()
    for (name, shares), colour in zip(rows.items(), _COLOURS * len(rows), strict=False):
        axes.plot(range(len(shares)), shares, marker="o", markersize=3, color=colour, label=f"{name} (tau {sum(shares):.2f})")
    axes.set(xlabel="position in the block (0 is the anchor)", ylim=(0, 1.03))
    axes.set_title(f"share of steps that commit the position, {label}", loc="left")
    axes.legend(fontsize=7, frameon=False)
    return save(figure, path)


def _tokens(traces, path):
    """New tokens over time for one prompt of each set."""
    if not any(events for methods in traces.values() for events in methods.values()):
        return None
    figure = figure_of(3.4 * len(traces), 3.2)
    labels = list(dict.fromkeys(label for methods in traces.values() for label in methods))
    for axes, (name, methods) in zip(figure.subplots(1, len(traces), squeeze=False)[0], traces.items(), strict=True):
        for label, events in methods.items():
            axes.step(
                [at for at, _ in events],
                [total for _, total in events],
                where="post",
                label=label,
                linewidth=1.2,
                color=_COLOURS[labels.index(label) % len(_COLOURS)],
            )
        axes.set(xlabel="seconds since the call", ylabel="new tokens")
        axes.set_title(f"{name}, first prompt", loc="left")
    axes.legend(fontsize=7, frameon=False)
    return save(figure, path)


def scaling(study, path):
    """Expected tau against block size, a line per task, dashed where it is extrapolated."""
    figure = figure_of(5.4, 3.4)
    axes = figure.subplots()
    for task, colour in zip(study["tasks"], _COLOURS * len(study["tasks"]), strict=False):
        sizes, taus, measured = study["block_sizes"], task["expected_tau"], task["measured_positions"]
        known = [(k, tau) for k, tau in zip(sizes, taus, strict=True) if k <= measured]
        rest = known[-1:] + [(k, tau) for k, tau in zip(sizes, taus, strict=True) if k > measured]
        axes.plot(*zip(*known, strict=True), color=colour, marker="o", markersize=3, label=task["name"])
        axes.plot(*zip(*rest, strict=True), color=colour, linestyle="--", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(study["block_sizes"], [str(k) for k in study["block_sizes"]])
    axes.set(xlabel="block size", ylabel="expected tau")
    axes.set_title("expected tau by block size (dashed: extrapolated)", loc="left")
    axes.legend(fontsize=7, frameon=False)
    return save(figure, path)
