"""`dflash-torchax compile`: programs for a TPU that is not here, and what its compiler says of them."""

from pathlib import Path

from . import output
from .output import CliError

_EPILOG = """\
presets: qwen3-4b (+ DFlash-b16), qwen3-8b (+ b16), llama3.1-8b (Instruct + UltraChat, block 10)

examples:
  dflash-torchax compile --preset qwen3-4b --topology v5p:2x2x1 --tau 6.5
  dflash-torchax compile --preset llama3.1-8b --topology v5e:2x2 --tp 4 --block-size 6,10
  dflash-torchax compile --target ./my-model --draft ./my-draft --topology v6e:2x2 --context 8192 --json report.json
  dflash-torchax compile --preset qwen3-4b --topology v5p:2x2x1 --save programs/

No TPU and no weights are needed; the extra [tpu] installs the compiler (libtpu).
"""


def add_parser(subparsers):
    parser = subparsers.add_parser(
        "compile",
        help="compile ahead of time for a TPU topology, from configs alone",
        epilog=_EPILOG,
        description="Compile prefill, plain step and DFlash step for a TPU and print memory, cost and collectives.",
    )
    pair = parser.add_argument_group("models")
    pair.add_argument("--preset", metavar="NAME", help="a published pair, see below")
    pair.add_argument("--target", metavar="CONFIG_OR_REPO", help="config.json, folder or Hugging Face repo of the target")
    pair.add_argument("--draft", metavar="CONFIG_OR_REPO", help="the same of the DFlash draft; 'none' for plain decoding")
    pair.add_argument("--block-size", type=_integers, metavar="K[,K...]", help="slots per block; default: the draft's")
    machine = parser.add_argument_group("machine and sizes")
    machine.add_argument("--topology", default="v5p:2x2x1", metavar="CHIP:SHAPE", help="e.g. v5p:2x2x1 (default), v5e:2x2, v6e:2x2")
    machine.add_argument(
        "--tp", type=_integer, default=1, metavar="N", help="chips that split heads, ffn and vocabulary (default 1)"
    )
    machine.add_argument("--dp", type=_integer, default=1, metavar="N", help="chips that split the batch (default 1)")
    machine.add_argument("--batch", type=_integer, default=1, metavar="B", help="rows (default 1)")
    machine.add_argument("--context", type=_integer, default=2048, metavar="S", help="prompt + output in tokens (default 2048)")
    machine.add_argument("--prefill", type=_integers, default=(), metavar="W[,W...]", help="also compile prompts of these widths")
    machine.add_argument(
        "--cache", choices=("auto", "paged", "static"), default="auto", help="the target's cache (default auto: paged)"
    )
    result = parser.add_argument_group("result")
    result.add_argument("--tau", type=float, metavar="T", help="committed tokens per step, to estimate ms per token")
    result.add_argument("--benchmark", metavar="FILE", help="JSON of `benchmark --output`: takes its mean tau")
    result.add_argument("--operations", type=_integer, metavar="N", help="also list the N costliest kinds of operations")
    result.add_argument("--json", nargs="?", const="-", metavar="FILE", help="write the document to FILE, or to stdout")
    result.add_argument("--plot", metavar="FILE", help="write a plot there (.svg, .png, .pdf)")
    result.add_argument("--save", metavar="FOLDER", help="save the programs that generate() runs, to be loaded on a TPU VM")


def run(args):
    from ..aot import pair

    _check(args)
    target, draft = _modules(args)
    if args.save:
        output.make_folder(args.save)
    sizes = {"tp": args.tp, "dp": args.dp, "batch": args.batch, "context": args.context, "cache": args.cache}
    document = pair.compile_pair(
        target,
        draft,
        args.topology,
        block_sizes=args.block_size or (None,),
        prefill=args.prefill,
        tau=_tau(args),
        progress=lambda name: output.note(f"compiling {name} ..."),
        operations=args.operations or 0,
        **sizes,
    )
    _write(args, document)
    if args.save:
        output.note("compiling the programs to save ...")
        for block_size in args.block_size or (None,):
            paths = pair.save_pair(
                target, draft, args.topology, args.save, block_size=block_size, prefill=args.prefill or (256,), **sizes
            )
            document.setdefault("saved", []).extend(str(path) for path in paths)
        _write(args, document)
    if args.json == "-":
        output.print_json(document)
    else:
        _show(document)
    if args.plot:
        from ..aot.plots import programs

        programs(document, args.plot)
    return output.EXIT_OK


def _check(args):
    """Whatever would be a pity to find out after minutes of compiling, and options that would have no effect."""
    if args.preset and args.target:
        raise CliError(f"--preset: {args.preset!r} has no effect with --target {args.target}; give one of the two.")
    if args.benchmark and args.tau is not None:
        raise CliError(f"--tau: {args.tau} has no effect with --benchmark, which gives its own; leave one of them out.")
    if args.draft == "none":
        given = {"--block-size": args.block_size, "--tau": args.tau, "--benchmark": args.benchmark}
        for option in (option for option, value in given.items() if value is not None):
            raise CliError(f"{option}: has no effect with --draft none; leave it out, or give a draft.")
    if args.json and args.json != "-":
        output.check_writable(args.json)
    output.check_plot("--plot", args.plot)


def _write(args, document):
    if args.json and args.json != "-":
        output.write_json(args.json, document)


def _modules(args):
    from ..aot.presets import PRESETS, STAND_INS
    from ..aot.programs import abstract_draft, abstract_target, read_config

    if args.preset and args.preset.lower() not in PRESETS:
        raise CliError(f"--preset: {args.preset!r} is none of {', '.join(PRESETS)}.")
    target = args.target or args.preset
    if target is None:
        raise CliError("--target: missing; give a config, a folder, a repo id, or --preset " + "|".join(PRESETS) + ".")
    draft = args.draft or (target if target.lower() in PRESETS else None)
    if draft is None:
        raise CliError("--draft: missing; give the draft's config, folder or repo id, or 'none' for plain decoding.")
    if args.save and draft.lower() in STAND_INS:
        raise CliError(f"--save: the preset {draft} has a stand-in for its draft's mask id, which every saved program would "
                       f"contain; name the checkpoint itself with --draft FOLDER_OR_REPO, or leave --save out.")
    fields = None if draft == "none" else read_config(draft, 1)
    return abstract_target(read_config(target, 0)), None if fields is None else abstract_draft(fields)


def _tau(args):
    if not args.benchmark:
        return args.tau
    import json

    try:
        document = json.loads(Path(args.benchmark).expanduser().read_text(encoding="utf-8"))
        label = document["settings"]["main_method"]
        taus = [next(iter(sizes.values()))[label]["tau"] for sizes in document["summary"].values()]
        return sum(taus) / len(taus)
    except OSError as error:
        raise CliError(f"--benchmark: {args.benchmark} cannot be read ({error.strerror}).") from error
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration, ZeroDivisionError) as error:
        raise CliError(f"--benchmark: {args.benchmark} is no JSON document of `dflash-torchax benchmark --output`.") from error


def _show(document):
    from rich.table import Table

    out = output.console()
    chip = document["chip"]
    out.print(
        f"{document['topology']}, tp {document['tp']}, dp {document['dp']}, batch {document['batch']}, "
        f"context {document['context']}, {document['cache']}; "
        f"{chip['name']}: {chip['flops'] / 1e12:.0f} TFLOP/s, {chip['bandwidth'] / 1e9:.0f} GB/s, "
        f"{chip['hbm'] / 2**30:.0f} GiB",
    )
    table = Table(title="Programs, per device", title_justify="left")
    columns = (
        "program",
        "compile s",
        "arguments",
        "temporary",
        "total",
        "fits",
        "GFLOP",
        "GB moved",
        "kernels",
        "estimated ms",
        "roofline ms",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "program" else "right")
    for row in document["programs"]:
        table.add_row(
            row["name"],
            f"{row['compile_seconds']:.1f}",
            _size(row["argument_bytes"]),
            _size(row["temporary_bytes"]),
            _size(row["total_bytes"]),
            "yes" if row["fits"] else "no",
            f"{row['flops'] / 1e9:.1f}",
            f"{row['bytes'] / 1e9:.2f}",
            str(row["kernel_calls"]),
            f"{row['estimated_ms']:.2f}",
            f"{row['roofline_ms']:.2f}",
        )
    out.print(table)
    for row in document["programs"]:
        moved = [f"{item['count']} {item['kind']} of {_size(item['bytes'])}" for item in row["collectives"]]
        if moved:
            out.print(f"{row['name']}: {', '.join(moved)}")
        for name, count, cycles in row.get("operations", ()):
            out.print(f"  {cycles:>12,} cycles  {count:>4} x  {name}")
    out.print(f"Largest context that fits: {document['largest_context']:,} tokens.")
    for row in document["per_token"]:
        text = f"Block {row['block_size']}: a DFlash step costs {row['step_over_plain']:.2f} plain steps"
        if row["tau"] is not None:
            text += (
                f"; at tau {row['tau']:.2f} {row['ms_per_token']:.2f} ms/token against {row['plain_ms']:.2f}, {row['speedup']:.2f}x"
            )
        out.print(text + ".")
    for path in document.get("saved", ()):
        out.print(f"saved {path}")
    out.print(document["note"], style="dim")


def _size(count):
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def _integer(text):
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def _integers(text):
    return tuple(_integer(part) for part in text.split(","))
