"""A benchmark's document as tables: rich on a screen, Markdown in a file."""

from .summary import DEFINITIONS, decay_order

COLUMNS = (
    "method",
    "ms/token",
    "tokens/s",
    "first token ms",
    "speedup (low..high)",
    "tau",
    "accepted",
    "exact",
    "compile s",
)
MEMORY, MEMORY_COLUMNS = "Memory, one call for each method", ("method", "the call", "peak MB")


def tables(document):
    """Yield (title, list of rows of texts) for every prompt set and batch size."""
    for name, sizes in document["summary"].items():
        for size, rows in sizes.items():
            prompts = next(iter(rows.values()))["prompts"]
            title = f"{name}: {prompts} prompts, batch {size}, up to {document['settings']['max_new_tokens']} new tokens"
            yield title, [_row(label, figures, document["methods"][label]) for label, figures in rows.items()]


def _row(label, figures, facts):
    return [
        label,
        _number(figures["ms_per_token"], 1),
        _number(figures["tokens_per_second"], 1),
        _number(figures["ttft_ms"], 0),
        _speedup(figures),
        _number(figures.get("tau"), 2),
        _percent(figures.get("acceptance_rate")),
        figures.get("exact", "-"),
        _number(facts["compile_seconds"] or None, 1),
    ]


def _number(value, digits):
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(value):
    return "-" if value is None else f"{value:.0%}"


def _speedup(figures):
    if figures["speedup"] is None:
        return "-"
    return f"{figures['speedup']:.2f}x ({figures['speedup_low']:.2f}..{figures['speedup_high']:.2f})"


def positions(document):
    """Rows (set, method, shares by position) of acceptance, first batch size."""
    for name, sizes in document["summary"].items():
        for label, figures in next(iter(sizes.values())).items():
            if figures.get("acceptance_by_position"):
                yield name, label, figures["acceptance_by_position"]


def memory(document):
    """Rows (method, the one call it was measured over, peak MB)."""
    first = {}
    for record in document["runs"]:
        first.setdefault(record["method"], record)
    for label, facts in document["methods"].items():
        if facts.get("peak_memory_bytes") is not None and label in first:
            record = first[label]
            sizes = f"{sum(record['prompt_tokens'])} prompt and {sum(record['new_tokens'])} new tokens"
            yield label, f"{record['set']}, batch {record['batch_size']}, {sizes}", f"{facts['peak_memory_bytes'] / 1e6:.0f}"


def notes(document):
    """Sentences that belong under the tables."""
    settings, lines = document["settings"], []
    temperature = settings["temperature"]
    lines.append(
        f"Speedups are over {settings['baseline']}; "
        + (
            f"tokens are compared with those of {settings['reference']}."
            if temperature == 0
            else f"temperature {temperature}: outputs differ by chance and are not compared."
        )
    )
    for name, sizes in document["summary"].items():
        for rows in sizes.values():
            for label, figures in rows.items():
                if "first_difference" in figures:
                    d = figures["first_difference"]
                    lines.append(
                        f"{name}, {label}: {figures['exact']} equal; the earliest difference is at new token {d['position']} "
                        f"({d['expected']} expected, {d['got']} came), where the two best logits are {d['top2_gap']:.2g} apart."
                    )
    compared = [record for record in document["runs"] if record["programs_compiled"]]
    if compared:
        lines.append(f"{len(compared)} timed calls compiled a program; their times include it.")
    load, cores = document["environment"]["load_average_at_start"], document["environment"]["cores"]
    if load is not None and load > cores / 2:
        lines.append(f"The machine was busy (load {load} on {cores} cores when the run began): do not trust the times of this run.")
    lines += document.get("skipped", [])
    order = decay_order(document["summary"], settings.get("main_method"))
    if order:
        lines.append(
            f"Tasks by decay of acceptance ({settings['main_method']}), slowest first: "
            + ", ".join(f"{name} (tau {tau:.2f}, like a constant acceptance of {rate:.2f})" for name, tau, rate in order)
            + "."
        )
    return lines


def environment_line(document):
    """One line about where it was measured."""
    env = document["environment"]
    versions = ", ".join(
        f"{name} {env['versions'][name]}" for name in ("torch", "torchax", "jax", "transformers") if name in env["versions"]
    )
    return (
        f"{env['date']}, {env['devices']} x {env['device']} ({env['cpu']}, {env['cores']} cores, {env['memory_gib']} GiB), "
        f"Python {env['python']}, {versions}, commit {env['commit'] or 'unknown'}; target {document['settings']['target']}, "
        f"draft {document['settings']['draft'] or 'none'}, {document['settings']['dtype']}"
    )


def print_rich(document, console):
    """Print everything on a rich console."""
    for title, rows in tables(document):
        console.print(_rich_table(title, COLUMNS, rows, left=("method",)))
    shares = [(name, label, " ".join(_share(share) for share in row)) for name, label, row in positions(document)]
    if shares:
        columns = ("set", "method", "share of steps")
        console.print(_rich_table("Acceptance by position (0 is the anchor; a row sums to tau)", columns, shares, left=columns))
    if peaks := list(memory(document)):
        console.print(_rich_table(MEMORY, MEMORY_COLUMNS, peaks, left=MEMORY_COLUMNS[:2]))
    for line in notes(document):
        console.print(line, markup=False)
    console.print(environment_line(document), style="dim", markup=False)


def _rich_table(title, columns, rows, left):
    """A table whose texts are shown as they are: names of sets and methods are no markup."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title, "table.title"), title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", no_wrap=column in ("set", "method"))
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def markdown(document, definitions=True):
    """Everything as Markdown, without a title."""
    parts = []
    for title, rows in tables(document):
        parts.append(f"**{title}**\n\n" + markdown_table(COLUMNS, rows))
    shares = [[name, label, " ".join(_share(share) for share in row)] for name, label, row in positions(document)]
    if shares:
        parts.append(
            "**Acceptance by position** (0 is the anchor; a row sums to tau)\n\n"
            + markdown_table(("set", "method", "share of steps"), shares, left=3)
        )
    if peaks := list(memory(document)):
        parts.append(f"**{MEMORY}**\n\n" + markdown_table(MEMORY_COLUMNS, peaks, left=2))
    parts.append("\n".join(f"- {line}" for line in notes(document)))
    if definitions:
        parts.append("\n".join(f"- `{name}`: {text}." for name, text in DEFINITIONS.items()))
    parts.append(f"Measured {environment_line(document)}.")
    return "\n\n".join(parts) + "\n"


def markdown_table(columns, rows, left=1):
    """A Markdown table; the first `left` columns are left-aligned."""
    marks = ["---" if index < left else "---:" for index in range(len(columns))]
    lines = [list(columns), marks, *[[str(cell) for cell in row] for row in rows]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _share(value):
    return "1" if value == 1 else f"{value:.3f}".lstrip("0")
