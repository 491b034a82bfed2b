"""`dflash-torchax chat`: a conversation in the terminal; each turn reads only what the caches do not hold yet."""

import contextlib
import sys
import time

from . import output, pair

_EPILOG = """\
examples:
  dflash-torchax chat
  dflash-torchax chat --system "Answer in one sentence."
  dflash-torchax chat --target Qwen/Qwen3-4B --draft z-lab/Qwen3-4B-DFlash-b16
  printf 'Hello\\nTell me more\\n' | dflash-torchax chat        one turn a line

in the chat: /reset forgets the conversation, /stats tells about the last answer, /exit or Ctrl-D leaves,
Ctrl-C stops an answer. Tokens that the draft proposed and the target accepted are green, the target's own are plain.
"""
_COMMANDS = "/reset forgets the conversation, /stats tells about the last answer, /exit leaves, Ctrl-C stops an answer"


def add_parser(subparsers):
    parser = subparsers.add_parser(
        "chat",
        help="talk in the terminal, several turns",
        epilog=_EPILOG,
        description="Talk to a model; accepted draft tokens are coloured.",
    )
    pair.add_arguments(parser)
    pair.add_sampling_arguments(parser)


def run(args):
    options = pair.sampling_options(args)
    loaded = pair.load(args)
    from .. import enable

    with output.waiting("Preparing ..."):
        enable(loaded.model, loaded.draft, block_size=args.block_size)
    pair.seed(args)
    talk = Conversation(loaded, args.system, args.max_new_tokens, options)
    interactive = sys.stdin is not None and sys.stdin.isatty()
    if interactive:
        output.note(f"{loaded.target_name}, draft: {loaded.draft_name or 'none'}. {_COMMANDS}.")
    while (line := _read_line(interactive)) is not None:
        if line in ("/exit", "/quit"):
            break
        if line == "/reset":
            talk.reset()
        elif line == "/stats":
            output.note(talk.stats_line() or "no answer yet")
        elif line.startswith("/"):
            output.note(_COMMANDS)
        elif line:
            _answer(talk, line, interactive)
    return output.EXIT_OK


def _read_line(interactive):
    """The next line without its end, or None at the end of input."""
    if not interactive:
        line = sys.stdin.readline() if sys.stdin is not None else ""
        return line.strip() if line else None
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (input() edits lines and remembers them once this is imported)
    try:
        return input("> ").strip()
    except EOFError:
        print()
        return None


def _answer(talk, line, interactive):
    """Print one answer as it is made; a mistake or Ctrl-C ends the answer, not the chat."""
    out = output.console()
    writer, blocks = Writer(out, talk.loaded.tokenizer), talk.reply(line)
    try:
        with output.waiting("..."):
            first = next(blocks)
        writer.add(*first)
        for ids, accepted in blocks:
            writer.add(ids, accepted)
        writer.end()
        if interactive:
            output.note(talk.stats_line())
    except KeyboardInterrupt:
        blocks.close()
        writer.end()
        if not interactive:
            raise
        output.note("stopped")
    except (ValueError, NotImplementedError) as error:
        if not interactive:
            raise
        output.complain(f"{output.one_line(error)} /reset starts afresh.")


class Conversation:
    """Messages so far, and the caches that hold them.

    Args:
        loaded: `pair.Pair` whose model is enabled.
        system: text of the system message, or None.
        max_new_tokens: longest answer.
        options: further arguments of `generate`.
    """

    def __init__(self, loaded, system, max_new_tokens, options):
        self.loaded, self.system, self.options = loaded, system, {"max_new_tokens": max_new_tokens, **options}
        self.reset()

    def reset(self):
        """Forget everything but the system message."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []
        self.cache = self.stats = self.seconds = None  # seconds and tokens of the last answer, stats if it was ended
        self.tokens = 0

    def reply(self, text):
        """Yield (new ids, how many of them the draft proposed) per committed block; the turn counts once it was ended or closed."""
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = pair.encode(self.loaded.tokenizer, messages)
        call = self.loaded.model.generate.prepare(ids, return_dict_in_generate=True, cache=self.cache, **self.options)
        self.stats, answer, start = None, [], time.perf_counter()
        try:
            for (new,), (accepted,) in call.blocks():
                answer += new
                yield new, accepted
            self.cache, self.stats = call.cache, call.stats
        finally:
            self.seconds, self.tokens = time.perf_counter() - start, len(answer)
            said = self.loaded.tokenizer.decode(answer, skip_special_tokens=True)
            self.messages = [*messages, {"role": "assistant", "content": said}]

    def stats_line(self):
        """About the last answer, or None; of a stopped one only what was seen of it."""
        if self.seconds is None:
            return None
        told, stats = f"{self.tokens} tokens in {self.seconds:.1f} s", self.stats
        if stats is None:
            return f"{told}, then stopped"
        parts = [told, f"{stats.num_prefill_tokens} prompt tokens read"]
        if stats.num_drafted_tokens:
            parts.append(f"tau {stats.acceptance_length:.2f}, {stats.acceptance_rate:.0%} of drafted tokens accepted")
        return ", ".join(parts)


class Writer:
    """Prints blocks as text: accepted draft tokens in green, the target's own plain."""

    def __init__(self, out, tokenizer):
        self.out, self.tokenizer = out, tokenizer
        self.ids, self.shown = [], 0

    def add(self, ids, accepted):
        """A committed block: its first `accepted` ids were drafted."""
        self._say(ids[:accepted], "green")
        self._say(ids[accepted:], None)

    def end(self):
        """Finish the line, with whatever was held back."""
        self._say([], None, final=True)
        self.out.print()

    def _say(self, ids, style, final=False):
        self.ids += ids
        text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        # An unfinished UTF-8 character decodes to U+FFFD: wait for its other tokens.
        ready = len(text) if final else len(text.rstrip("\ufffd"))
        if ready > self.shown:
            output.write(self.out, text[self.shown : ready], style)
            self.shown = ready
