"""Builds what is generated in docs/ and README.md: tables and plots from docs/results/*.json, the API page from docstrings.

Usage: python docs/build.py [--check]; --check changes nothing and exits 1 where a page is out of date.
"""

import importlib
import inspect
import json
import pkgutil
import re
import sys
from pathlib import Path

import tpu_estimates
import training_curves

import dflash_torchax
from dflash_torchax.benchmark import plots, report, scaling

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
BENCHMARK, MATH = DOCS / "results" / "benchmark.json", DOCS / "results" / "math.json"
_BLOCK = re.compile(r"(<!-- results:begin -->\n).*?(<!-- results:end -->)", re.DOTALL)

_HOW = """\
Made by `make results`: one run of `dflash-torchax benchmark`. Its raw records are in
[results/benchmark.json](results/benchmark.json); this page and its plots are made from that file."""
_MACHINE = """\
The machine has {cores} CPU cores and no accelerator. On a CPU the cost of a step grows with the block, so speedups here are far
below those of a TPU or GPU, and blocks of 16 would not pay; tau does not depend on the machine. Small sets and few prompts: look
at the spread before you compare."""
_STUDY = """\
`dflash-torchax study scaling` adds up acceptance by position. Beyond the measured positions nothing is known; two tails bracket it
(`a..b`): the ratio of the last positions goes on, or one constant ratio with the same tau does. A longer block needs a draft that
was trained for it."""
_PLOTS = {
    "speedup": "Speedup over the plain loop, by prompt set and method",
    "tau": "Tokens per step, by prompt set and method",
    "positions": "Acceptance by position for each prompt set",
    "tokens": "New tokens over time for the first prompt of each set",
}


def benchmark_document():
    """The committed benchmark."""
    return json.loads(BENCHMARK.read_text(encoding="utf-8"))


def math_document():
    """The committed run over math prompts alone."""
    return json.loads(MATH.read_text(encoding="utf-8"))


def studies(document):
    """(scaling study of the published rows, the same of the committed benchmark)."""
    return scaling.study(*scaling.published()), scaling.study(*scaling.from_benchmark(document))


def results_page(document):
    """docs/results.md."""
    published, own = studies(document)
    parts = ["# Results", _HOW, _MACHINE.format(cores=document["environment"]["cores"])]
    parts += ["## Methods side by side", ratios_line(document), report.markdown(document).strip()]
    if MATH.is_file():
        parts.append(math_line(math_document(), "results/math.json"))
    parts += [f"![{alt}](images/{name}.svg)" for name, alt in _PLOTS.items()]
    parts += ["## What longer blocks would bring", _STUDY, f"**{published['source']}**", _study(published)]
    parts += ["![Expected tau by block size, published rows](images/scaling.svg)", f"**{own['source']}**", _study(own)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _study(study):
    parts = [f"{title}\n\n{report.markdown_table(columns, rows)}" for title, columns, rows in scaling.tables(study)]
    return "\n\n".join([*parts, "\n".join(f"- {line}" for line in scaling.sentences(study))])


def readme_block(document):
    """What stands between the marks in README.md."""
    keep = ("method", "ms/token", "speedup (low..high)", "tau", "accepted", "exact")
    index = [report.COLUMNS.index(name) for name in keep]
    parts = [
        f"**{title}**\n\n{report.markdown_table(keep, [[row[i] for i in index] for row in rows])}"
        for title, rows in report.tables(document)
    ]
    parts.append(
        "Speedup is over `ar`, our own compiled loop without a draft; `hf` is transformers' generate, `zlab` z-lab's own loop, "
        "both in PyTorch. All figures, definitions and plots: [docs/results.md](docs/results.md)."
    )
    parts.append(ratios_line(document))
    parts += _busy(document)
    parts.append(f"Measured {report.environment_line(document)}.")
    if MATH.is_file():
        parts.append(math_line(math_document(), "docs/results/math.json"))
    return "\n\n".join(part for part in parts if part) + "\n"


def ratios_line(document):
    """A sentence on our best DFlash method against HF and z-lab on gsm8k, or '' where the run has none of these."""
    sizes = document["summary"].get("gsm8k", {})
    times = {label: figures["ms_per_token"] for label, figures in next(iter(sizes.values()), {}).items()}
    by_name = {label: document["methods"][label]["method"] for label in times if times[label] is not None}
    ours = min((label for label, name in by_name.items() if name == "dflash"), key=times.get, default=None)
    others = [label for label, name in by_name.items() if name in ("hf", "zlab")]
    if ours is None or not others:
        return ""
    ratios = " and ".join(f"{times[label] / times[ours]:.2f} times as fast as `{label}` ({times[label]:.1f})" for label in others)
    return f"On gsm8k `{ours}` takes {times[ours]:.1f} ms/token: {ratios}."


def _busy(document):
    return [line for line in report.notes(document) if "busy" in line]


def math_line(document, link):
    """A few sentences on a run over math prompts alone."""
    rows = [dict(zip(report.COLUMNS, row, strict=True)) for row in next(iter(report.tables(document)))[1]]
    cells = [f"{row['method']} {row['ms/token']}" + ("" if row["tau"] == "-" else f" (tau {row['tau']})") for row in rows]
    load = document["environment"]["load_average_at_start"]
    told = f"`make results-math`, ten math prompts alone ([results/math.json]({link})), ms/token: {', '.join(cells)}; "
    return " ".join(line for line in (f"{told}load {load} when it began.", ratios_line(document), *_busy(document)) if line)


def with_block(text, block):
    """A page with the block between its marks replaced; unchanged where it has no marks."""
    return _BLOCK.sub(lambda match: match[1] + "\n" + block + "\n" + match[2], text)


def api_page():
    """docs/api.md: public names with signatures and docstrings, then one line for each module."""
    parts = ["# API", "Made from docstrings by `python docs/build.py`.", "```python\nimport dflash_torchax\n```"]
    for name in dflash_torchax.__all__:
        if name != "__version__":
            parts += _entry(name, getattr(dflash_torchax, name))
    rows = [[f"`{name}`", line] for name, line in _modules()]
    parts += ["## Modules", report.markdown_table(("module", "job"), rows, left=2)]
    return "\n\n".join(parts) + "\n"


def _entry(name, value, level="##"):
    try:
        signature = re.sub(r"<[\w.]+ object at 0x\w+>|<factory>", "...", str(inspect.signature(value)))
    except (TypeError, ValueError):
        signature = ""
    parts = [f"{level} {name}", f"```python\n{name}{signature}\n```", docstring(value)]
    if inspect.isclass(value) and level == "##":
        for method, member in inspect.getmembers(value):
            if (
                not method.startswith("_")
                and callable(member)
                and member.__qualname__.startswith(f"{value.__name__}.")
                and inspect.getdoc(member)
            ):
                parts += _entry(f"{name}.{method}", member, "###")
    return parts


def docstring(value):
    """A docstring as Markdown: `Args:` and the like become lists."""
    lines, listed = [], False
    for line in (inspect.getdoc(value) or "").splitlines():
        section = re.fullmatch(r"(Args|Fields|Returns|Raises|Yields):", line)
        item = listed and re.match(r"    (\S[\w, *.`]*): (.*)", line)
        if section:
            listed = section[1] in ("Args", "Fields", "Raises")
            lines += ["", f"**{section[1]}**", ""]
        elif item:
            lines.append(f"- `{item[1].strip('`')}`: {item[2]}")
        else:
            lines.append(
                line.strip()
                if line.startswith("    ") and lines and not lines[-1].startswith("- ")
                else re.sub("^    +", "  ", line)
            )
    return re.sub("\n{3,}", "\n\n", "\n".join(lines)).strip()


def _modules():
    """(module, first line of its docstring) of the package."""
    for info in pkgutil.walk_packages(dflash_torchax.__path__, "dflash_torchax."):
        if not info.name.endswith("__main__"):
            text = importlib.import_module(info.name).__doc__ or ""
            yield info.name, " ".join(text.strip().split("\n\n")[0].split())


def pages():
    """path -> text of everything generated but plots."""
    made = {DOCS / "api.md": api_page()}
    if BENCHMARK.is_file():
        document, readme = benchmark_document(), ROOT / "README.md"
        made[DOCS / "results.md"] = results_page(document)
        if readme.is_file():
            made[readme] = with_block(readme.read_text(encoding="utf-8"), readme_block(document))
    estimates = json.loads(tpu_estimates.FILE.read_text(encoding="utf-8"))
    made[DOCS / "tpu.md"] = with_block((DOCS / "tpu.md").read_text(encoding="utf-8"), tpu_estimates.block(estimates))
    return made


def main(argv):
    stale = [path for path, text in pages().items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    if "--check" in argv:
        for path in stale:
            print(f"out of date: {path.relative_to(ROOT)}; run: python docs/build.py")
        return 1 if stale else 0
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
    if BENCHMARK.is_file():
        document = benchmark_document()
        plots.benchmark(document, DOCS / "images")
        plots.scaling(studies(document)[0], DOCS / "images" / "scaling.svg")
    training_curves.draw(json.loads(training_curves.FILE.read_text(encoding="utf-8")), DOCS / "images" / "training.svg")
    print(f"{len(stale)} pages changed")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
