"""What every command shares: streams, exit codes, one-line errors, files that are whole or not there."""

import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path

EXIT_OK, EXIT_ERROR, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_CLOSED_PIPE = 0, 1, 2, 130, 141

_LINE = 160  # longest line `dumps` keeps in one piece
_FILE_WIDTH = 140  # columns of a table that goes to a file or a pipe
_PLOT_SUFFIXES = (".svg", ".png", ".pdf")


class CliError(Exception):
    """A mistake of the user's, already explained in one sentence."""


def console(stderr=False):
    """A rich console on stdout or stderr that takes no text for markup or emoji codes.

    A closed pipe raises BrokenPipeError instead of rich's silent exit.
    """
    from rich.console import Console

    class Piped(Console):
        def on_broken_pipe(self):
            raise BrokenPipeError

    stream = sys.stderr if stderr else sys.stdout
    wide = None if stream.isatty() or os.environ.get("COLUMNS") else _FILE_WIDTH
    return Piped(file=stream, highlight=False, markup=False, emoji=False, width=wide)


def write(out, text, style=None):
    """Write text on a console as it is, tabs included, and nothing after it."""
    from rich.segment import Segment, Segments

    out.print(Segments([Segment(text, out.get_style(style) if style else None)]), end="", soft_wrap=True)
    out.file.flush()


def note(message):
    """One line for the user that is not the result: on stderr, dimmed."""
    console(stderr=True).print(message, style="dim", soft_wrap=True)


def complain(message):
    """The one line of an error, on stderr."""
    with contextlib.suppress(OSError, ValueError):  # stderr may be closed as well
        print(f"dflash-torchax: {message}", file=sys.stderr, flush=True)


def one_line(error):
    """An exception's message on one line; its type too where the message alone would not be understood."""
    text = " ".join(str(error).split())
    if isinstance(error, (CliError, ValueError, NotImplementedError, FileNotFoundError, ImportError)) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def flush():
    """Flush stdout here, where a closed pipe is still handled, not at interpreter exit."""
    if sys.stdout is not None:
        sys.stdout.flush()


def drop_stdout():
    """After a closed pipe: point stdout at nothing, so that the interpreter's last flush stays silent."""
    with contextlib.suppress(OSError, ValueError):
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        os.close(devnull)


@contextlib.contextmanager
def tidy_terminal():
    """Within: SIGTERM unwinds like Ctrl-C, missing streams swallow output. After: cursor shown, colours reset."""
    with contextlib.ExitStack() as stack:
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:  # started with the stream closed
                setattr(sys, name, stack.enter_context(open(os.devnull, "w")))
                stack.callback(setattr, sys, name, None)
        if threading.current_thread() is threading.main_thread():
            before = signal.signal(signal.SIGTERM, _on_sigterm)
            stack.callback(signal.signal, signal.SIGTERM, before)
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where the shell ignores it
                signal.signal(signal.SIGINT, _on_sigint)
                stack.callback(signal.signal, signal.SIGINT, signal.default_int_handler)
            _asked.clear()
        try:
            yield
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    if stream.isatty():
                        stream.write("\x1b[0m\x1b[?25h")
                        stream.flush()


# An exception that a signal raises inside a callback of a library is printed and lost; what was asked for is kept here.
_asked: list[BaseException] = []


def _on_sigterm(signum, frame):
    _asked.append(SystemExit(128 + signum))
    raise _asked[-1]


def _on_sigint(signum, frame):
    _asked.append(KeyboardInterrupt())
    raise _asked[-1]


def check_interrupted():
    """Raise again what a signal asked for; for long loops, between two pieces of work."""
    if _asked:
        raise _asked[-1]


def print_json(document):
    """Print a JSON document on stdout in one write: whole or not at all."""
    sys.stdout.write(dumps(document) + "\n")


def dumps(document, indent=""):
    """JSON text in which whatever fits on a line stays on it: small enough to diff, readable enough to review."""
    line = json.dumps(document)
    if len(line) <= _LINE or not isinstance(document, (dict, list)):
        return line
    deeper = indent + " "
    if isinstance(document, dict):
        parts = [f"{json.dumps(str(key))}: {dumps(value, deeper)}" for key, value in document.items()]
    elif all(isinstance(item, (int, float)) for item in document):
        return line
    else:
        parts = [dumps(item, deeper) for item in document]
    inner = f",\n{deeper}".join(parts)
    opening, closing = "{}" if isinstance(document, dict) else "[]"
    return f"{opening}\n{deeper}{inner}\n{indent}{closing}"


def check_writable(path):
    """Raise CliError now, before hours of work, where `path` could not be written at the end."""
    folder = Path(path).expanduser().absolute().parent
    if not folder.is_dir():
        raise CliError(f"{path}: the folder {folder} does not exist; make it first, or choose another file.")
    if Path(path).is_dir() or not os.access(folder, os.W_OK):
        raise CliError(f"{path}: cannot be written; choose another file.")


def check_plot(option, path):
    """Raise CliError now where the plot that `option` asks for could not be made at the end; None is no plot."""
    if path is None:
        return
    check_writable(path)
    if Path(path).suffix.lower() not in _PLOT_SUFFIXES:
        raise CliError(f"{option}: {str(path)!r} names no format; end it with one of {', '.join(_PLOT_SUFFIXES)}.")
    need_matplotlib(option)


def need_matplotlib(option):
    """Raise CliError where matplotlib, which `option` needs, is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise CliError(f"{option}: matplotlib is missing. Run: pip install 'dflash_torchax[benchmark]'") from None


def make_folder(path):
    """Make a folder for results; CliError where that cannot be."""
    try:
        Path(path).expanduser().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CliError(f"{path}: cannot be made a folder ({error.strerror}); choose another.") from error


@contextlib.contextmanager
def replacing(path):
    """Yield a temporary path beside `path` that takes its place at the end; nothing is left of it on an error."""
    path = Path(path).expanduser()
    handle, scratch = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.", suffix=path.suffix)
    os.close(handle)
    try:
        yield Path(scratch)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(scratch, 0o666 & ~umask)  # mkstemp's files are private; a result is not
        os.replace(scratch, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(scratch)


def deliver(args, document, show):
    """Write --output and print --json or what `show(document)` prints; a plot comes after, so that it can lose nothing."""
    if args.output:
        write_json(args.output, document)
    if args.json:
        print_json(document)
    else:
        show(document)


def write_text(path, text):
    """Write a text file as a whole: readers see the old one or the new one."""
    with replacing(path) as scratch:
        scratch.write_text(text, encoding="utf-8")


def write_json(path, document):
    """Write a JSON file as a whole."""
    write_text(path, dumps(document) + "\n")


def quiet_libraries():
    """No progress bars and warnings of other libraries between our own output."""
    import warnings

    import huggingface_hub
    import transformers

    warnings.simplefilter("ignore", FutureWarning)  # of packages that call each other's older spellings

    huggingface_hub.utils.logging.set_verbosity_error()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with contextlib.suppress(ImportError):
        import datasets

        datasets.utils.logging.set_verbosity_error()


@contextlib.contextmanager
def waiting(message):
    """A spinner on stderr while something takes its time; nothing where stderr is no terminal."""
    from rich.text import Text

    err = console(stderr=True)
    if not err.is_terminal:
        yield
        return
    with err.status(Text(message)):  # a str would be read as markup
        yield
