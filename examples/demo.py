"""Generate with the embedded pair, stream the text, then measure DFlash, plain decoding and HF in this run."""

import argparse
import os
import statistics
import time

import torch
from rich.console import Console
from rich.table import Table
from transformers import TextStreamer

import dflash_torchax as dflash

PROMPT = "A farmer has 12 hens. Each hen lays 5 eggs a week. He sells eggs at 3 dollars a dozen. How much does he earn in 4 weeks?"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    console = Console()

    console.print("Loading SmolLM2-135M-Instruct (converted once on the first run) and its DFlash draft ...")
    model, draft, tokenizer = dflash.load_embedded()
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": args.prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    options = {"max_new_tokens": args.max_new_tokens, "do_sample": False}

    console.print("Compiling ...\n")
    console.print(f"[bold]{args.prompt}[/bold]\n", highlight=False)
    dflash.enable(model, draft)
    model.generate(**inputs, max_new_tokens=2, do_sample=False, streamer=Silent())  # compiles, so that the text flows
    model.generate(**inputs, **options, streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True))
    console.print("\n(the answer of a 135M model with 4-bit weights, mistakes included)", style="dim")
    rows = measure(model, draft, inputs, options, args.repeats, console)
    console.print(table_of(rows))
    cores, load = os.cpu_count() or 1, os.getloadavg()[0]
    if load > cores + 1:
        console.print(f"Load average {load:.1f} on {cores} cores: other processes disturbed this; repeat it on a quiet machine.")
    console.print("On a CPU a wide step costs more than a plain one; on a TPU nearly the same, with larger drafts.")


class Silent:
    """A streamer that shows nothing."""

    def put(self, value): ...

    def end(self): ...


def measure(model, draft, inputs, options, repeats, console):
    """name -> dict(seconds, compile, tokens, ids, stats); the methods take turns, so that drift hits all alike."""
    generates = {}
    for name, chosen in (("HF", None), ("plain loop", ()), ("DFlash", draft)):
        dflash.disable(model)
        if chosen is not None:
            dflash.enable(model, chosen or None)
        generates[name] = model.generate
    rows = {name: {"seconds": []} for name in generates}
    for turn in range(repeats + 1):
        for name, generate in generates.items():
            doing = "compiling and warming up" if turn == 0 else f"measuring, turn {turn} of {repeats}"
            with console.status(f"{name}: {doing} ..."):
                start = time.perf_counter()
                ids = generate(**inputs, **options)
                elapsed = time.perf_counter() - start
            if not console.is_terminal:
                console.print(f"{name}: {doing}: {elapsed:.1f} s")
            row = rows[name]
            row.update(ids=ids, tokens=ids.shape[1] - inputs.input_ids.shape[1], stats=getattr(generate, "last_stats", None))
            if turn == 0:
                row["first"] = elapsed
            else:
                row["seconds"].append(elapsed)
    return rows


def table_of(rows):
    table = Table(title="measured in this run, float32, batch 1")
    for column in ("method", "tokens", "tau", "ms/token", "vs HF", "vs plain", "compile", "= HF"):
        table.add_column(column, justify="left" if column == "method" else "right")
    reference = rows["HF"]
    per_token_of = lambda row: statistics.median(row["seconds"]) / row["tokens"]
    for name, row in rows.items():
        seconds = statistics.median(row["seconds"])
        per_token = per_token_of(row)
        stats = row["stats"] if name == "DFlash" else None
        table.add_row(
            name,
            str(row["tokens"]),
            f"{stats.acceptance_length:.2f}" if stats else "-",
            f"{1e3 * per_token:.1f}",
            f"{per_token_of(reference) / per_token:.2f}x",
            f"{per_token_of(rows['plain loop']) / per_token:.2f}x",
            "-" if row is reference else f"{max(row['first'] - seconds, 0):.1f} s",
            "-" if row is reference else ("yes" if torch.equal(row["ids"], reference["ids"]) else "NO"),
        )
    return table


if __name__ == "__main__":
    main()
