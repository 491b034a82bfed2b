"""`dflash-torchax study`: questions answered from measurements. `scaling`: what longer blocks would bring."""

import json
from pathlib import Path

from . import k_flat, output
from .output import CliError

_EPILOG = """\
examples:
  dflash-torchax study scaling                                     the published v5p rows
  dflash-torchax study scaling --benchmark results.json            acceptance measured here
  dflash-torchax study scaling --cost 1=25.5,4=41,8=47,16=66       and the best block size for these step times
  dflash-torchax study scaling --plot scaling.svg --json
"""


_STUDIES = """\
examples:
  dflash-torchax study scaling --benchmark results.json
  dflash-torchax study k-flat --widths 1,4,16,64 --output k_flat.json
  dflash-torchax study scaling --cost k_flat.json
"""


def add_parser(subparsers):
    parser = subparsers.add_parser(
        "study",
        epilog=_STUDIES,
        help="what measurements say about block sizes and cost by width",
        description="Answer a question from measurements.",
    )
    studies = parser.add_subparsers(title="studies", metavar="STUDY", required=True)
    scaling = studies.add_parser(
        "scaling",
        help="tau and gain by block size, from acceptance by position",
        epilog=_EPILOG,
        description="Expected tau for blocks of 2..128, and whether the field's statements about it hold.",
    )
    scaling.add_argument("--benchmark", metavar="FILE", help="JSON of `benchmark --output`; default: the published v5p rows")
    scaling.add_argument("--method", metavar="LABEL", help="the benchmark's method to take; default: its main one")
    scaling.add_argument("--cost", metavar="TABLE", help="ms of a step by width: WIDTH=MS,... or a JSON file of `study k-flat`")
    scaling.add_argument("--json", action="store_true", help="print the study as JSON instead of a table")
    scaling.add_argument("--output", metavar="FILE", help="write the JSON there")
    scaling.add_argument("--plot", metavar="FILE", help="write a plot there (.svg, .png, .pdf)")
    scaling.set_defaults(study=run_scaling)
    k_flat.add_parser(studies)
    studies.choices["k-flat"].set_defaults(study=k_flat.run)


def run(args):
    return args.study(args)


def run_scaling(args):
    from ..benchmark import scaling

    if args.output:
        output.check_writable(args.output)
    output.check_plot("--plot", args.plot)
    if args.method and not args.benchmark:
        raise CliError("--method: belongs to a benchmark; add --benchmark FILE.")
    rows, source = scaling.from_benchmark(_read(args.benchmark), args.method) if args.benchmark else scaling.published()
    document = scaling.study(rows, source, scaling.parse_cost(args.cost) if args.cost else None)
    output.deliver(args, document, lambda document: _show(document, scaling))
    if args.plot:
        from ..benchmark import plots

        plots.scaling(document, args.plot)
    return output.EXIT_OK


def _read(path):
    try:
        return json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise CliError(f"--benchmark: {path} cannot be read ({error.strerror}).") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CliError(f"--benchmark: {path} is not JSON ({error}).") from error


def _show(document, scaling):
    from rich.table import Table

    out = output.console()
    out.print(document["source"])
    for title, columns, rows in scaling.tables(document):
        table = Table(title=title, title_justify="left")
        for column in columns:
            table.add_column(column, justify="left" if column == "task" else "right", no_wrap=column == "task")
        for row in rows:
            table.add_row(*row)
        out.print(table)
    for line in scaling.sentences(document):
        out.print(line)
    out.print(
        "Two figures a..b: beyond the measured positions the last ratios, or one constant ratio, are continued. "
        "A longer block needs a draft trained for it.",
        style="dim",
    )
