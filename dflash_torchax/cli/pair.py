"""The target and draft a command works on: arguments, loading, prompts."""

import contextlib
import dataclasses
from pathlib import Path

from . import output
from .output import CliError

NO_DRAFT = "none"


@dataclasses.dataclass
class Pair:
    """A loaded target and draft (None: plain decoding), the tokenizer, and the names they were asked for by."""

    model: object
    draft: object
    tokenizer: object
    target_name: str
    draft_name: str | None
    draft_path: str | None


def add_arguments(parser, block_size=True):
    """The options that choose a pair."""
    group = parser.add_argument_group("models")
    group.add_argument(
        "--target", metavar="PATH_OR_REPO", help="Hugging Face causal model; default: the embedded SmolLM2-135M-Instruct"
    )
    group.add_argument(
        "--draft",
        metavar="PATH_OR_REPO",
        help=f"DFlash draft of that target; default: the embedded one for the embedded target, '{NO_DRAFT}' for any other",
    )
    if block_size:
        group.add_argument(
            "--block-size",
            type=block_size_or_auto,
            metavar="N",
            help="slots per block, anchor included; default: the draft's; 'auto' picks the fastest while it runs",
        )
    group.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="default: float32 embedded, else the checkpoint's"
    )


def positive(text):
    """argparse type: an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def block_size_or_auto(text):
    """argparse type: an integer of at least 1, or 'auto'."""
    return text if text == "auto" else positive(text)


positive.__name__ = "positive integer"
block_size_or_auto.__name__ = "positive integer or 'auto'"


def draftless(args):
    """Whether `args` ask for the target alone."""
    return args.draft == NO_DRAFT or (args.target is not None and args.draft is None)


def load(args, *, torch_weights=False):
    """Load the pair that `args` asks for.

    Args:
        args: parsed arguments of `add_arguments`.
        torch_weights: keep the weights in the torch module too, for methods that run PyTorch.

    Raises:
        CliError: not found, not reachable, not a checkpoint, or a block size without a draft; names the option.
    """
    if draftless(args) and getattr(args, "block_size", None) is not None:
        raise CliError(f"--block-size: {args.block_size} has no effect without a draft; give a --draft, or leave it out.")
    for option, path in (("--target", args.target), ("--draft", args.draft)):
        check_exists(option, path)
    output.quiet_libraries()
    import torch

    dtype = getattr(torch, args.dtype) if args.dtype else None
    with output.waiting("Loading the models ..."):
        if args.target is None:
            model, tokenizer, draft_path = _embedded(args, dtype or torch.float32)
        else:
            model, tokenizer = _target(args.target, dtype, torch_weights)
            draft_path = None if args.draft in (None, NO_DRAFT) else args.draft
        draft = None if draft_path is None else _draft(draft_path)
    return Pair(model, draft, tokenizer, args.target or "SmolLM2-135M-Instruct (embedded)", _name(draft_path), draft_path)


def _embedded(args, dtype):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from .. import embedded

    folder = embedded.embedded_target_folder()
    path = str(embedded.DRAFT_FOLDER) if args.draft is None else args.draft
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model, AutoTokenizer.from_pretrained(folder), None if path == NO_DRAFT else path


def _target(path, dtype, torch_weights):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ..loading import load_target

    with explained("--target", path):
        tokenizer = AutoTokenizer.from_pretrained(path)
        if torch_weights:
            return AutoModelForCausalLM.from_pretrained(path, dtype=dtype or "auto").eval(), tokenizer
        return load_target(path, dtype=dtype), tokenizer


def _draft(path):
    from ..loading import load_draft

    with explained("--draft", path):
        return load_draft(path)


def check_exists(option, path):
    """Raise CliError for a path that is neither a folder nor spelt like a repo id; announce a look at the hub."""
    if path in (None, NO_DRAFT) or Path(path).expanduser().is_dir():
        return
    if str(path).startswith((".", "/", "~")) or str(path).count("/") != 1:
        raise CliError(f"{option}: {str(path)!r} is not a folder, nor a repo id like 'owner/name'.")
    output.note(f"{path} is no local folder: asking the Hugging Face hub ...")


@contextlib.contextmanager
def explained(option, path):
    """Turn what loaders raise into one sentence with the option's name."""
    try:
        yield
    except (ValueError, NotImplementedError, FileNotFoundError) as error:
        if not Path(path).expanduser().is_dir() and isinstance(error, FileNotFoundError):
            raise _unreachable(option, path, error) from error
        raise CliError(f"{option}: {output.one_line(error).removeprefix('path_or_repo: ')}") from error
    except Exception as error:  # the hub's errors have no common base: network, rights, names, HTTP libraries
        if Path(path).expanduser().is_dir():
            raise
        raise _unreachable(option, path, error) from error


def _unreachable(option, path, error):
    return CliError(
        f"{option}: {path} is no local folder and could not be fetched from the Hugging Face hub "
        f"({type(error).__name__}); give a folder, or check the network and the name."
    )


def _name(path):
    return None if path is None else Path(path).name if Path(path).is_dir() else str(path)


def encode(tokenizer, messages, raw=False):
    """A conversation (list of role/content dicts) or, with `raw`, its last text, as int64 ids [1, length].

    Raises:
        CliError: nothing to encode.
    """
    if raw or getattr(tokenizer, "chat_template", None) is None:
        text = "\n".join(message["content"] for message in messages)
        ids = tokenizer(text, return_tensors="pt").input_ids
    else:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
            "input_ids"
        ]
    if ids.shape[1] == 0:
        raise CliError("prompt: empty; give at least one token of text.")
    return ids.long()


def add_sampling_arguments(parser):
    """The options of how a text is continued."""
    group = parser.add_argument_group("generation")
    group.add_argument("--max-new-tokens", type=positive, default=256, metavar="N", help="default: %(default)s")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 (default) is greedy: the target's own tokens")
    group.add_argument("--top-p", type=float, metavar="P", help="nucleus sampling; needs --temperature")
    group.add_argument("--top-k", type=int, metavar="K", help="sample among the K likeliest; needs --temperature")
    group.add_argument("--seed", type=int, default=0, help="of the random numbers with --temperature; default: %(default)s")
    group.add_argument("--system", metavar="TEXT", help="system message of the chat template")


def sampling_options(args):
    """Keyword arguments for `generate` from `add_sampling_arguments`.

    Raises:
        CliError: values that contradict each other.
    """
    if args.temperature < 0:
        raise CliError(f"--temperature: {args.temperature}; give 0 for greedy or a positive number.")
    if args.temperature == 0:
        for option in ("top_p", "top_k"):
            if getattr(args, option) is not None:
                raise CliError(f"--{option.replace('_', '-')}: has no effect without --temperature; add --temperature 1.0.")
        return {"do_sample": False}
    chosen = {"top_p": args.top_p, "top_k": args.top_k}
    return {"do_sample": True, "temperature": args.temperature} | {k: v for k, v in chosen.items() if v is not None}


def seed(args):
    """Make what follows reproducible, as HF does it."""
    import torch

    torch.manual_seed(args.seed)
