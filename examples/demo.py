"""Generate with the embedded pair, stream the text, then measure DFlash, plain decoding and HF in this run."""

import argparse
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
    dflash.enable(model, draft)
    model.generate(**inputs, max_new_tokens=2, do_sample=False, streamer=Silent())  # compiles, so that the text flows
    model.generate(**inputs, **options, streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True))
    rows = measure(model, draft, inputs, options, args.repeats)
    console.print()
    console.print(table_of(rows))


class Silent:
    """A streamer that shows nothing."""

    def put(self, value): ...

    def end(self): ...


def measure(model, draft, inputs, options, repeats):
    """name -> dict(seconds, compile, tokens, ids, stats); the methods take turns, so that drift hits all alike."""
    generates = {}
    for name, chosen in (("HF generate", None), ("plain loop (ours)", ()), ("DFlash (ours)", draft)):
        dflash.disable(model)
        if chosen is not None:
            dflash.enable(model, chosen or None)
        generates[name] = model.generate
    rows = {name: {"seconds": []} for name in generates}
    for turn in range(repeats + 1):
        for name, generate in generates.items():
            start = time.perf_counter()
            ids = generate(**inputs, **options)
            elapsed = time.perf_counter() - start
            row = rows[name]
            row.update(ids=ids, tokens=ids.shape[1] - inputs.input_ids.shape[1], stats=getattr(generate, "last_stats", None))
            if turn == 0:
                row["first"] = elapsed
            else:
                row["seconds"].append(elapsed)
    return rows


def table_of(rows):
    table = Table(title="measured in this run, float32, batch 1")
    for column in ("method", "tokens", "tau", "acceptance", "ms/token", "speedup", "compile s", "equals HF"):
        table.add_column(column, justify="left" if column == "method" else "right")
    reference = rows["HF generate"]
    baseline = statistics.median(reference["seconds"]) / reference["tokens"]
    for name, row in rows.items():
        seconds = statistics.median(row["seconds"])
        per_token = seconds / row["tokens"]
        stats = row["stats"] if name == "DFlash (ours)" else None
        table.add_row(
            name,
            str(row["tokens"]),
            f"{stats.acceptance_length:.2f}" if stats else "-",
            f"{stats.acceptance_rate:.0%}" if stats else "-",
            f"{1e3 * per_token:.1f}",
            f"{baseline / per_token:.2f}x",
            "-" if row is reference else f"{max(row['first'] - seconds, 0):.1f}",
            "-" if row is reference else ("yes" if torch.equal(row["ids"], reference["ids"]) else "NO"),
        )
    return table


if __name__ == "__main__":
    main()
