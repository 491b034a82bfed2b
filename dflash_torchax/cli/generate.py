"""`dflash-torchax generate`: one prompt, streamed, with a line of statistics."""

import contextlib
import sys
import time

from . import output, pair
from .output import CliError

_EPILOG = """\
examples:
  dflash-torchax generate "Natalia sold 48 clips in April and half as many in May. How many in all?"
  dflash-torchax generate < question.txt
  dflash-torchax generate --target Qwen/Qwen3-4B --draft z-lab/Qwen3-4B-DFlash-b16 "Prove that 2 + 2 = 4."
  dflash-torchax generate --draft none "Hello"           the target alone, compiled
  dflash-torchax generate --raw "Once upon a time"       continue a text, no chat template
  dflash-torchax generate --json "Hello" > answer.json   {"text": ..., "stats": ...} and nothing else on stdout
"""


def add_parser(subparsers):
    parser = subparsers.add_parser(
        "generate", help="answer one prompt", description="Answer one prompt, streaming the text.", epilog=_EPILOG
    )
    parser.add_argument("prompt", nargs="?", help="the prompt; left out or '-': read from stdin")
    parser.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the text")
    parser.add_argument("--quiet", action="store_true", help="no statistics on stderr")
    pair.add_arguments(parser)
    pair.add_sampling_arguments(parser)


def run(args):
    if args.raw and args.system:
        raise CliError(f"--system: {args.system!r} has no effect with --raw; write it into the prompt, or leave out --raw.")
    prompt = _prompt(args.prompt)
    options = pair.sampling_options(args)
    loaded = pair.load(args)
    from .. import enable, last_stats

    messages = ([{"role": "system", "content": args.system}] if args.system else []) + [{"role": "user", "content": prompt}]
    ids = pair.encode(loaded.tokenizer, messages, args.raw)
    with output.waiting("Preparing ..."):
        enable(loaded.model, loaded.draft, block_size=args.block_size)
    _compile(loaded, ids, args.max_new_tokens, options)
    pair.seed(args)
    clock = TextClock(loaded.tokenizer, None if args.json else sys.stdout)
    try:
        new = loaded.model.generate(ids, max_new_tokens=args.max_new_tokens, streamer=clock, **options)[0, ids.shape[1] :]
    except KeyboardInterrupt:
        clock.end()  # what was held back, and the line's end
        raise
    stats = last_stats(loaded.model)
    text = loaded.tokenizer.decode(new, skip_special_tokens=True)
    if args.json:
        output.print_json(
            {
                "text": text,
                "tokens": new.tolist(),
                "prompt_tokens": ids.shape[1],
                "new_tokens": len(new),
                "target": loaded.target_name,
                "draft": loaded.draft_name,
                "block_size": loaded.model.generate.engine.block_size,
                "seconds": round(clock.seconds, 4),
                "stats": {
                    name: getattr(stats, name)
                    for name in (
                        "num_steps",
                        "num_drafted_tokens",
                        "num_accepted_tokens",
                        "acceptance_length",
                        "acceptance_rate",
                        "accepted_by_position",
                    )
                },
            }
        )
    else:
        output.flush()
        if not args.quiet:
            output.note(stats_line(stats, clock, loaded.draft is not None))
    return output.EXIT_OK


def _prompt(given):
    """The prompt as text, from the argument or from stdin."""
    if given not in (None, "-"):
        text = given
    elif sys.stdin is None or sys.stdin.isatty():
        raise CliError("prompt: none given; write it after the command, or pipe it in (echo ... | dflash-torchax generate).")
    else:
        try:
            text = sys.stdin.read().rstrip("\n")
        except UnicodeDecodeError as error:
            raise CliError(f"prompt: stdin is not UTF-8 text ({error}).") from error
    if not text.strip():
        raise CliError("prompt: empty; write some text.")
    return text


def _compile(loaded, ids, max_new_tokens, options):
    """Run two tokens first with caches of the real size, so that the text then flows and its time is its own."""
    with output.waiting("Compiling for this prompt length (kept for the next time) ..."), contextlib.suppress(_Enough):
        loaded.model.generate(ids, max_new_tokens=max_new_tokens, streamer=_StopAfter(2), **options)


class _Enough(Exception):
    """Raised out of a streamer to end a generation early."""


class _StopAfter:
    """A streamer that shows nothing and raises `_Enough` once it was given so many columns (the prompt is one)."""

    def __init__(self, columns):
        self.left = columns

    def put(self, value):
        self.left -= 1
        if self.left < 0:
            raise _Enough

    def end(self): ...


class TextClock:
    """A streamer that writes text as soon as it is whole and notes when tokens arrive.

    Args:
        tokenizer: decodes the tokens.
        stream: where the text goes; None keeps silent.
    """

    def __init__(self, tokenizer, stream):
        self.tokenizer, self.stream = tokenizer, stream
        self.prompt_seen, self.tokens = False, 0
        self.tail, self.shown = [], 0  # ids since the last line end, and how much of their text is out
        self.started, self.first, self.last = time.perf_counter(), None, None

    @property
    def seconds(self):
        """From start to the last token."""
        return (self.last or self.started) - self.started

    def put(self, value):
        if not self.prompt_seen and value.ndim > 1:
            self.prompt_seen = True
            return
        self.last = time.perf_counter()
        self.first = self.first or self.last
        new = value.reshape(-1).tolist()
        self.tokens += len(new)
        self.tail += new
        self._write(final=False)

    def end(self):
        self._write(final=True)
        if self.stream is not None:
            self.stream.write("\n")
            self.stream.flush()

    def _write(self, final):
        if self.stream is None:
            return
        text = self.tokenizer.decode(self.tail, skip_special_tokens=True)
        # An unfinished UTF-8 character decodes to U+FFFD: wait for its other tokens.
        ready = len(text) if final else len(text.rstrip("\ufffd"))
        if ready > self.shown:
            self.stream.write(text[self.shown : ready])
            self.stream.flush()
            self.shown = ready
        if text.endswith("\n") and ready == len(text):
            self.tail, self.shown = [], 0


def stats_line(stats, clock, drafted):
    """'64 tokens in 1.9 s, ...': one line about a finished call."""
    tokens = clock.tokens
    parts = [f"{tokens} tokens in {clock.seconds:.2f} s"]
    if tokens > 1 and clock.last > clock.first:
        parts.append(
            f"first after {clock.first - clock.started:.2f} s, then {1e3 * (clock.last - clock.first) / (tokens - 1):.1f} ms/token"
        )
    if drafted and stats.num_steps:
        parts.append(f"tau {stats.acceptance_length:.2f}, {stats.acceptance_rate:.0%} of drafted tokens accepted")
    return ", ".join(parts)
