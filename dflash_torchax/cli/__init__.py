"""The command line: `dflash-torchax COMMAND`, also `python -m dflash_torchax COMMAND`.

Each command is a module here with `add_parser(subparsers)` and `run(args) -> exit code`. Modules import torch and
jax inside `run` only, so that `--help` answers at once.
"""

import argparse
import importlib
import sys
import traceback

from .._about import VERSION
from . import output

# Commands in the order of --help, each a module here.
COMMANDS = ("generate", "chat", "info", "benchmark", "study", "compile", "train")

_EPILOG = """\
examples:
  dflash-torchax generate "What is 12 * 7?"        stream an answer of the embedded SmolLM2 pair
  echo "What is 12 * 7?" | dflash-torchax generate
  dflash-torchax chat                              talk to it, accepted draft tokens coloured
  dflash-torchax info CHECKPOINT                   what a checkpoint is and what it fits
  dflash-torchax benchmark --methods ar,dflash     a table measured here
  dflash-torchax COMMAND --help                    all options of a command, with examples

exit codes: 0 done, 1 error (one line on stderr; --debug shows the traceback), 2 wrong usage,
130 interrupted (Ctrl-C), 141 the reader of the output went away.
Colours follow NO_COLOR and are left out where the output is not a terminal.
"""


def main(argv=None):
    """Run the command line.

    Args:
        argv: arguments without the program's name; None takes those of the process.

    Returns:
        The exit code: 0, 1 (error), 2 (usage), 130 (interrupted) or 141 (closed pipe). Nothing is raised.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    debug = "--debug" in argv  # wherever it stands, also behind a command of a command
    argv = [word for word in argv if word != "--debug"]
    try:
        with output.tidy_terminal():
            args = _parser(argv).parse_args(argv)
            code = args.run(args)
            output.flush()
            return code or output.EXIT_OK
    except SystemExit as stop:  # argparse: 0 after --help, 2 for wrong usage; 143 on SIGTERM
        return stop.code if isinstance(stop.code, int) else output.EXIT_OK if stop.code is None else output.EXIT_ERROR
    except KeyboardInterrupt:
        output.complain("interrupted")
        return output.EXIT_INTERRUPTED
    except BrokenPipeError:
        output.drop_stdout()
        return output.EXIT_CLOSED_PIPE
    except Exception as error:  # whatever it is, a user gets one line
        if debug:
            traceback.print_exc()
        output.complain(output.one_line(error) + ("" if debug or isinstance(error, output.CliError) else " (--debug shows where)"))
        return output.EXIT_ERROR


class _Parser(argparse.ArgumentParser):
    """Keeps the lines of its examples as they are, and those of its subcommands."""

    def __init__(self, **options):
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, **options})


def _parser(argv):
    parser = _Parser(
        prog="dflash-torchax",
        description="DFlash speculative decoding for Hugging Face models through torchax and XLA.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"dflash-torchax {VERSION}")
    _add_debug(parser)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    # Only the command asked for is imported; --help and a misspelt name need them all.
    asked = next((word for word in argv if not word.startswith("-")), None)
    for name in (asked,) if asked in COMMANDS else COMMANDS:
        module = importlib.import_module(f".{name}", __name__)
        module.add_parser(subparsers)
        subparsers.choices[name].set_defaults(run=module.run)
    for subparser in subparsers.choices.values():
        _add_debug(subparser)
    return parser


def _add_debug(parser):
    """For --help only: `main` has taken it out."""
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
