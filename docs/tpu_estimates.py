"""Lets the TPU compiler estimate every published pair that fits a topology: docs/results/tpu_estimates.json.

Usage: python docs/tpu_estimates.py (about 15 minutes on one core; needs the extra [tpu]), then python docs/build.py.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from dflash_torchax.benchmark.report import markdown_table

FILE = Path(__file__).parent / "results" / "tpu_estimates.json"
# (topology, chips that split a model, presets)
RUNS = [
    ("v5p:2x2x1", 1, ("qwen3-4b", "qwen3-8b", "llama3.1-8b")),
    ("v5p:2x2x1", 4, ("llama3.1-8b", "qwen3-8b")),
    ("v5e:2x2", 1, ("qwen3-4b",)),
    ("v5e:2x2", 4, ("qwen3-8b", "llama3.1-8b")),
    ("v6e:2x2", 1, ("qwen3-4b", "qwen3-8b", "llama3.1-8b")),
    ("v6e:2x2", 4, ("qwen3-8b", "llama3.1-8b")),
]
_COLUMNS = ("pair", "topology, tp", "plain step ms", "DFlash step ms", "ratio", "roofline ms, plain / DFlash", "arguments GB",
            "temporaries MB", "largest context")
_STUDY = "k-flat v5p:2x2x1 tp1"


def estimate():
    """Compile everything anew, each pair in its own process, and write the file."""
    document = {}
    for topology, tp, presets in RUNS:
        for preset in presets:
            print(f"{preset} on {topology}, tp {tp}", flush=True)
            options = "--preset", preset, "--topology", topology, "--tp", tp, "--operations", 12
            document[f"{preset} {topology} tp{tp}"] = _cli("--json", "compile", *options)
    document[_STUDY] = _cli("--output", "study", "k-flat", "--preset", "qwen3-4b", "--topology", "v5p:2x2x1", "--context", 2048,
                            "--widths", "1,16,64")
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(result)}" for name, result in document.items())
    FILE.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def _cli(option, *words):
    """The JSON that `dflash-torchax` with these words writes to the file behind `option`."""
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/out.json"
        command = [sys.executable, "-m", "dflash_torchax", *map(str, words), option, file]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.loads(Path(file).read_text(encoding="utf-8"))


def block(document):
    """What stands between the marks of docs/tpu.md."""
    rows = []
    for name, pair in document.items():
        if name != _STUDY:
            plain, step = pair["programs"]
            rows.append([
                f"{name.split()[0]}, block {step['width']}", f"{pair['topology']}, {pair['tp']}", f"{plain['estimated_ms']:.2f}",
                f"{step['estimated_ms']:.2f}", f"{step['estimated_ms'] / plain['estimated_ms']:.2f}",
                f"{plain['roofline_ms']:.2f} / {step['roofline_ms']:.2f}", f"{step['argument_bytes'] / 1e9:.2f}",
                f"{step['temporary_bytes'] / 1e6:.0f}", f"{pair['largest_context']:,}",
            ])
    widths = document[_STUDY]["rows"]
    times = [row["estimated_ms"] for row in widths]
    by_width = ", ".join(f"{row['width']} tokens {ms:.2f} ms ({ms / times[0]:.2f})" for row, ms in zip(widths, times, strict=True))
    costliest = next(iter(document.values()))["programs"][1]["operations"]
    return "\n\n".join([
        markdown_table(_COLUMNS, rows, left=2),
        f"Qwen3-4B on v5p, verify by width: {by_width}.",
        "Where the scheduler expects the cycles of the Qwen3-4B DFlash step on v5p:",
        markdown_table(("operations", "count", "cycles"), [[name, str(n), f"{cycles:,}"] for name, n, cycles in costliest]),
    ]) + "\n"


if __name__ == "__main__":
    estimate()
