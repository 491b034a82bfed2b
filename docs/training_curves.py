"""Held-out tau over training time of the shipped drafts: docs/results/training.json, drawn by docs/build.py.

Usage: python docs/training_curves.py dflash=RUN,RUN,... eagle3=RUN,RUN,...
Each RUN is the folder of one stage, with the log.jsonl that `dflash-torchax train` writes; stages follow each other.
"""

import json
import sys
from pathlib import Path

from dflash_torchax.benchmark import plots

FILE = Path(__file__).parent / "results" / "training.json"
TASKS = ("math", "code", "chat")


def curve(folders):
    """[{stage, step, minutes, tau by task}] of every evaluation, minutes counted from the first stage on."""
    points, before = [], 0.0
    for folder in map(Path, folders):
        entries = [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").split("\n") if line]
        minutes = 0.0
        for entry in entries:
            if "held_out" in entry:
                minutes = entry["seconds"] / 60
                point = {"stage": folder.name, "step": entry["step"], "minutes": round(before + minutes, 1)}
                points.append(point | {task: entry["held_out"]["by_task"][task] for task in TASKS})
        before += minutes
    return points


def draw(document, path):
    """One panel per task, one line per draft."""
    figure = plots.figure_of(8, 2.6)
    for axes, task in zip(figure.subplots(1, len(TASKS)), TASKS, strict=True):
        for name, points in document.items():
            axes.plot([p["minutes"] for p in points], [p[task] for p in points], marker=".", label=name)
        axes.set(title=task, xlabel="minutes of training")
    figure.axes[0].set_ylabel("held-out tau, teacher forced")
    figure.axes[0].legend(frameon=False)
    plots.save(figure, path)


if __name__ == "__main__":
    document = {name: curve(folders.split(",")) for name, _, folders in (text.partition("=") for text in sys.argv[1:])}
    FILE.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
