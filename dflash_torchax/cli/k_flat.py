"""`dflash-torchax study k-flat`: is verifying K tokens as cheap as one? Measured here, estimated for a TPU."""

from . import output, pair
from .output import CliError

_EPILOG = """\
examples:
  dflash-torchax study k-flat                                        measure the embedded target here
  dflash-torchax study k-flat --preset qwen3-4b --topology v5p:2x2x1 the compiler's estimate for a TPU
  dflash-torchax study k-flat --target ./model --widths 1,4,16,64 --output k_flat.json --plot k_flat.svg
"""


def add_parser(subparsers):
    parser = subparsers.add_parser(
        "k-flat",
        help="verify cost by number of tokens: measured, estimated, roofline",
        epilog=_EPILOG,
        description="Measure what verifying K tokens costs on this device, and estimate it for a TPU.",
    )
    parser.add_argument("--target", metavar="PATH_OR_REPO", help="model to measure; default: the embedded SmolLM2-135M-Instruct")
    parser.add_argument("--preset", metavar="NAME", help="config to estimate with --topology; nothing is measured then")
    parser.add_argument("--topology", metavar="CHIP:SHAPE", help="also let a TPU's compiler estimate, e.g. v5p:2x2x1")
    parser.add_argument("--widths", type=_widths, metavar="K,K,...", help="tokens verified at once (default 1,2,4,...,128)")
    parser.add_argument("--context", type=pair.positive, default=256, metavar="S", help="tokens in the cache (default 256)")
    parser.add_argument("--repeats", type=pair.positive, default=9, metavar="N", help="rounds of the measurement (default 9)")
    parser.add_argument("--json", action="store_true", help="print the study as JSON instead of a table")
    parser.add_argument("--output", metavar="FILE", help="write the JSON there")
    parser.add_argument("--plot", metavar="FILE", help="write a plot there (.svg, .png, .pdf)")


def run(args):
    from ..aot import widths

    _check(args)
    document = study(args, args.widths or widths.WIDTHS)
    output.deliver(args, document, _show)
    if args.plot:
        from ..aot.plots import widths as plot

        plot(document, args.plot)
    return output.EXIT_OK


def _check(args):
    """Whatever would be a pity to find out after the measurement."""
    if args.output:
        output.check_writable(args.output)
    output.check_plot("--plot", args.plot)
    if args.preset and not args.topology:
        raise CliError("--preset: has no weights to measure; add --topology, or measure a --target.")
    if args.preset and args.target:
        raise CliError(f"--target: {args.target!r} has no effect with --preset {args.preset}; give one of the two.")


def study(args, chosen):
    """The document: rows by width, what is flat up to where, and the chip's crossover."""
    import jax

    from ..aot import widths
    from ..aot.topology import chip_of

    rows = {width: {"width": width} for width in chosen}
    document = {
        "title": args.preset or args.target or "SmolLM2-135M-Instruct",
        "context": args.context,
        "rows": list(rows.values()),
    }
    if not args.preset:
        document["device"] = jax.devices()[0].device_kind
        output.note(f"measuring on {document['device']} ...")
        for row in widths.measure(_model(args.target), chosen, args.context, args.repeats):
            rows[row["width"]].update(row)
        document["measured_flat_up_to"] = widths.flat_up_to(document["rows"], "ms")
    if args.topology:
        from ..aot.programs import abstract_target, read_config

        document.update(topology=args.topology, crossover_tokens=chip_of(args.topology).crossover())
        fields = read_config(args.preset or args.target or _embedded_folder(), 0)
        for row in widths.estimate(
            abstract_target(fields), args.topology, chosen, args.context, progress=lambda name: output.note(f"compiling {name} ...")
        ):
            rows[row["width"]].update(row)
        document["estimated_flat_up_to"] = widths.flat_up_to(document["rows"], "estimated_ms")
    return document


def _model(target):
    if target is None:
        from ..embedded import load_embedded

        return load_embedded()[0]
    from ..loading import load_target

    return load_target(target)


def _embedded_folder():
    from ..embedded import embedded_target_folder

    return embedded_target_folder()


def _show(document):
    from rich.table import Table

    out = output.console()
    table = Table(title=f"{document['title']}, context {document['context']}", title_justify="left")
    keys = [("ms", "measured ms"), ("estimated_ms", "compiler's estimate ms"), ("roofline_ms", "roofline ms")]
    keys = [(key, title) for key, title in keys if document["rows"][0].get(key) is not None]
    for column in ("tokens", *(text for _, title in keys for text in (title, "/ first"))):
        table.add_column(column, justify="right")
    first = document["rows"][0]
    for row in document["rows"]:
        table.add_row(str(row["width"]), *(text for key, _ in keys for text in (f"{row[key]:.2f}", f"{row[key] / first[key]:.2f}")))
    out.print(table)
    for key, how in (
        ("measured_flat_up_to", f"Measured on {document.get('device')}"),
        ("estimated_flat_up_to", "By the compiler's estimate"),
    ):
        if key in document:
            out.print(f"{how}: within 1.3 times the first width up to {document[key]} tokens.")
    if "crossover_tokens" in document:
        out.print(
            f"A bfloat16 weight is read as fast as it is used up to {document['crossover_tokens']:.0f} tokens on this "
            f"chip; beyond, cost grows with width. Estimates are the compiler's, not timings."
        )


def _widths(text):
    values = tuple(int(part) for part in text.split(","))
    if min(values) < 1:
        raise ValueError
    return tuple(sorted(set(values)))
