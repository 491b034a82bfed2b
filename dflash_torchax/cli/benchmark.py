"""`dflash-torchax benchmark`: methods side by side on the same prompts, in one shuffled schedule."""

import contextlib
import time

from . import output, pair
from .output import CliError

_NOTE_SECONDS = 30.0

_EPILOG = """\
methods (--methods, comma separated; a block size may follow, as in dflash:8):
  ar                our compiled loop without a draft: the baseline
  dflash            our compiled loop with the DFlash draft
  eagle3            our compiled loop with an EAGLE-3 draft (--eagle3)
  prompt-lookup     our compiled loop drafting from the text so far
  hf                transformers' own generate
  hf-prompt-lookup  transformers' own prompt lookup
  zlab              z-lab's own loop (pip install --no-deps dflash==0.1.0)

data sets (--datasets, from the Hugging Face hub, prompts as in z-lab's benchmark):
  gsm8k, math500, humaneval, mbpp, mt-bench, alpaca
Without --datasets and --prompts: small sets that ship with the package (gsm8k, code, chat); no network needed.

examples:
  dflash-torchax benchmark                                           ar and dflash on the shipped prompts
  dflash-torchax benchmark --methods ar,dflash,hf,zlab --num-prompts 4 --output results.json --plots plots
  dflash-torchax benchmark --target Qwen/Qwen3-4B --draft z-lab/Qwen3-4B-DFlash-b16 --datasets gsm8k,math500 \\
      --num-prompts 128 --max-new-tokens 2048
  dflash-torchax benchmark --prompts math=questions.jsonl --block-sizes 2,4,8 --json > results.json
"""


def add_parser(subparsers):
    parser = subparsers.add_parser(
        "benchmark",
        help="measure methods side by side",
        epilog=_EPILOG,
        description="Measure methods side by side: ms/token, speedup, tau, exactness, memory, compile time.",
    )
    pair.add_arguments(parser, block_size=False)
    parser.add_argument(
        "--eagle3", metavar="PATH_OR_REPO", help="EAGLE-3 checkpoint of the target; default: the shipped one of the embedded target"
    )
    what = parser.add_argument_group("what to measure")
    what.add_argument("--methods", type=words, metavar="NAMES", help="default: ar,dflash (ar alone without a draft)")
    what.add_argument("--datasets", type=words, default=[], metavar="NAMES", help="public prompt sets, see below")
    what.add_argument(
        "--prompts",
        action="append",
        default=[],
        metavar="[NAME=]FILE",
        help='JSON lines with "prompt" or "turns"; may be repeated; works offline',
    )
    what.add_argument("--num-prompts", type=pair.positive, default=10, metavar="N", help="of each set; default: %(default)s")
    what.add_argument("--max-new-tokens", type=pair.positive, default=128, metavar="N", help="default: %(default)s")
    what.add_argument("--block-sizes", type=numbers, default=[], metavar="N,N", help="for drafting methods; default: the draft's")
    what.add_argument("--batch-sizes", type=numbers, default=[1], metavar="N,N", help="default: 1")
    what.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 (default) is greedy, and outputs are compared")
    what.add_argument(
        "--repeats", type=pair.positive, default=1, metavar="N", help="timed calls for each method and prompt; medians are taken"
    )
    what.add_argument("--thinking", choices=("on", "off"), help="enable_thinking of the chat template, where it knows that")
    what.add_argument("--baseline", metavar="LABEL", help="method that speedups refer to; default: ar if it runs, else the first")
    what.add_argument("--seed", type=int, default=0, help="of the order of methods and of sampling; default: %(default)s")
    shown = parser.add_argument_group("output")
    shown.add_argument("--json", action="store_true", help="print the whole document as JSON instead of tables")
    shown.add_argument("--output", metavar="FILE", help="write the JSON document there")
    shown.add_argument("--markdown", metavar="FILE", help="write the tables there as Markdown")
    shown.add_argument("--plots", metavar="FOLDER", help="write speedup, tau, acceptance and token plots there (SVG)")


def words(text):
    """argparse type: comma separated names."""
    return [word.strip() for word in text.split(",") if word.strip()]


def numbers(text):
    """argparse type: comma separated integers of at least 1."""
    return [pair.positive(word) for word in words(text)]


words.__name__, numbers.__name__ = "comma separated list", "comma separated list of positive integers"


def run(args):
    _check(args)
    sets = _prompt_sets(args)
    names = args.methods or (["ar"] if pair.draftless(args) else ["ar", "dflash"])
    from ..benchmark import compose

    for name in names:
        compose.parse(name)
    loaded = pair.load(args, torch_weights=compose.needs_torch_weights(names))
    eagle3 = args.eagle3 or (compose.shipped_eagle3() if args.target is None else None)
    with output.waiting("Preparing the methods ..."):
        methods = compose.make_methods(names, loaded.model, loaded.draft, loaded.draft_path, args.block_sizes, eagle3)
    document = measure(args, loaded, methods, sets)
    _deliver(args, document)
    return output.EXIT_OK


def _check(args):
    """Whatever would be a pity to find out after the measurement."""
    for path in (args.output, args.markdown):
        if path:
            output.check_writable(path)
    if args.plots:
        output.make_folder(args.plots)
        output.need_matplotlib("--plots")
    if args.temperature < 0:
        raise CliError(f"--temperature: {args.temperature}; give 0 for greedy or a positive number.")


def _prompt_sets(args):
    from ..benchmark import prompts

    output.quiet_libraries()
    sets = [prompts.file_set(text, args.num_prompts) for text in args.prompts]
    for name in args.datasets:
        if name not in prompts.PUBLIC:
            raise CliError(
                f"--datasets: {name!r} is not known; choose among {', '.join(prompts.PUBLIC)}, or give --prompts FILE.jsonl."
            )
        with output.waiting(f"Fetching {name} ..."):
            sets.append(prompts.public_set(name, args.num_prompts))
    sets = sets or prompts.shipped_sets(args.num_prompts)
    seen = [one.name for one in sets]
    for name in seen:
        if seen.count(name) > 1:
            raise CliError(f"--prompts: two sets are called {name!r}; name one of them with NAME=FILE.")
    return sets


def measure(args, loaded, methods, sets):
    """Run the schedule; returns the JSON document."""
    from ..benchmark import compose, environment, exactness, prompts, schedule, summary
    from ..benchmark.methods import Budget, Compiled

    labels = [method.label for method in methods]
    baseline = args.baseline or ("ar" if "ar" in labels else labels[0])
    if baseline not in labels:
        raise CliError(f"--baseline: {baseline!r} does not run; choose among {', '.join(labels)}.")
    where = environment.describe()
    budget = Budget(args.max_new_tokens, eos_ids(loaded), args.temperature, args.seed)
    template = {} if args.thinking is None else {"enable_thinking": args.thinking == "on"}
    plain = next((method for method in methods if method.label == baseline), methods[0])

    def answer(ids):
        return loaded.tokenizer.decode(plain.run([ids], budget).tokens[0], skip_special_tokens=True)

    with output.waiting("Encoding the prompts ..."):
        encoded = {one.name: prompts.expand(one, loaded.tokenizer, answer, **template) for one in sets}
    _check_lengths(encoded, loaded, args.max_new_tokens)
    compiled = next((method.engine for method in methods if isinstance(method, Compiled)), None)
    gap = exactness.Top2Gap(compiled) if args.temperature == 0 and compiled is not None else None
    reference = "hf" if "hf" in labels else baseline
    plan = schedule.Plan(encoded, budget, tuple(args.batch_sizes), args.repeats, args.seed, reference)
    with progress_bar() as on_step:
        result = schedule.run(methods, plan, gap, lambda *step: (output.check_interrupted(), on_step(*step)))
    return {
        "kind": "benchmark",
        "schema": 1,
        "environment": where,
        "settings": {
            "target": loaded.target_name,
            "draft": loaded.draft_name,
            "dtype": str(loaded.model.dtype).removeprefix("torch."),
            "sets": {one.name: one.source for one in sets},
            "max_new_tokens": args.max_new_tokens,
            "temperature": args.temperature,
            "batch_sizes": args.batch_sizes,
            "repeats": args.repeats,
            "seed": args.seed,
            "baseline": baseline,
            "reference": reference,
            "main_method": compose.main_method(methods),
        },
        "definitions": summary.DEFINITIONS,
        "skipped": compose.skipped(methods, args.batch_sizes),
        "summary": summary.summarise(result, baseline, args.max_new_tokens),
        **result,
    }


def eos_ids(loaded):
    """The ids that end a row: the model's generation config, else the tokenizer's."""
    ids = loaded.model.generation_config.eos_token_id
    ids = loaded.tokenizer.eos_token_id if ids is None else ids
    return () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)


def _check_lengths(encoded, loaded, max_new_tokens):
    limit = getattr(loaded.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    for name, rows in encoded.items():
        longest = max(len(row) for row in rows)
        if limit is not None and longest + max_new_tokens > limit:
            raise CliError(
                f"--max-new-tokens: {max_new_tokens} after a prompt of {longest} tokens in {name} passes the target's "
                f"{limit} positions; lower it."
            )


@contextlib.contextmanager
def progress_bar():
    """Progress on stderr: a bar in a terminal, a line every half minute elsewhere. Yields `on_step` of `schedule.run`.

    It draws between calls only: a thread that redraws would take its share of what is being timed.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    err = output.console(stderr=True)
    if not err.is_terminal:
        yield _SparseNotes()
        return
    columns = (BarColumn(bar_width=30), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=err, transient=True, auto_refresh=False) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total, what: progress.update(task, completed=done, total=total, description=what, refresh=True)


class _SparseNotes:
    """An `on_step` for logs."""

    def __init__(self):
        self.last = time.monotonic()

    def __call__(self, done, total, what):
        if time.monotonic() - self.last >= _NOTE_SECONDS:
            self.last = time.monotonic()
            output.note(f"{done} of {total} calls done, now {what}")


def _deliver(args, document):
    from ..benchmark import plots, report

    if args.output:
        output.write_json(args.output, document)
    if args.markdown:
        output.write_text(args.markdown, report.markdown(document))
    if args.json:
        output.print_json(document)
    else:
        report.print_rich(document, output.console())
    if args.plots:
        plots.benchmark(document, args.plots)
