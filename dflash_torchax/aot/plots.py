"""Plots of what a compiler said, as image files."""

from ..benchmark.plots import figure_of, save


def programs(document, path):
    """Bars of estimated and roofline ms per program of a `pair.compile_pair` document."""
    rows = document["programs"]
    figure = figure_of(1.6 + 1.1 * len(rows), 3.4)
    axes = figure.add_subplot()
    index = range(len(rows))
    axes.bar([i - 0.2 for i in index], [row["roofline_ms"] for row in rows], 0.4, label="roofline", color="#8c8c8c")
    axes.bar([i + 0.2 for i in index], [row["estimated_ms"] for row in rows], 0.4, label="compiler's estimate", color="#4c72b0")
    axes.set_xticks(list(index), [row["name"] for row in rows], rotation=20)
    axes.set(
        ylabel="ms", title=f"{document['topology']}, tp {document['tp']}, batch {document['batch']}, context {document['context']}"
    )
    axes.legend()
    save(figure, path)


def widths(document, path):
    """Verify cost against width, measured and estimated, of a k-flat document."""
    figure = figure_of(5.2, 3.4)
    axes = figure.add_subplot()
    for key, label in (("ms", "measured here"), ("estimated_ms", "compiler's estimate"), ("roofline_ms", "roofline")):
        points = [(row["width"], row[key]) for row in document["rows"] if row.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
    if document.get("crossover_tokens"):
        axes.axvline(document["crossover_tokens"], linestyle=":", color="#8c8c8c", label="crossover of the chip")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(xlabel="tokens verified at once", ylabel="ms", title=document["title"])
    axes.legend()
    save(figure, path)
