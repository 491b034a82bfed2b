"""From names on a command line to methods that can run, or a refusal that names the method and the reason."""

import json

from ..eagle3_model import is_eagle3
from ..embedded import DRAFT_FOLDER
from ..engine import Engine
from ..loading import load_draft
from .methods import HF, Compiled, ZLab
from .prompt_lookup import PromptLookup

METHODS = {
    "ar": "our compiled loop without a draft: the baseline",
    "dflash": "our compiled loop with the DFlash draft",
    "eagle3": "our compiled loop with an EAGLE-3 draft; needs --eagle3",
    "prompt-lookup": "our compiled loop drafting from the text so far; no weights",
    "hf": "transformers' own generate",
    "hf-prompt-lookup": "transformers' own prompt_lookup_num_tokens",
    "zlab": "z-lab's own loop (package dflash) with the same DFlash draft",
}
_BLOCKLESS = ("ar", "hf")
_COMPILED = ("ar", "dflash", "eagle3", "prompt-lookup")
_DEFAULT_BLOCK = 8  # for methods without a trained block size
# Which method's acceptance the order of tasks is about, the first that ran.
_MAIN = ("dflash", "eagle3", "zlab", "prompt-lookup", "hf-prompt-lookup")


def parse(word):
    """'dflash:8' -> ('dflash', 8), 'dflash' -> ('dflash', None).

    Raises:
        ValueError: an unknown name, or a block size that is none.
    """
    name, _, size = word.partition(":")
    if name not in METHODS:
        raise ValueError(f"methods: {name!r} is not known; choose among {', '.join(METHODS)}.")
    if size and (not size.isdigit() or int(size) < 1 or name in _BLOCKLESS):
        raise ValueError(f"methods: {word!r}; a block size of at least 1 may follow a drafting method, as in dflash:8.")
    return name, int(size) if size else None


def make_methods(words, model, draft=None, draft_path=None, block_sizes=(), eagle3=None):
    """The methods, one for each name and block size, all on one copy of the target's weights.

    Args:
        words: keys of `METHODS`, drafting ones optionally with a block size: 'dflash:8'.
        model: HF model with its weights in torch where `hf` or `zlab` are named.
        draft, draft_path: a DFlash draft and where it was loaded from.
        block_sizes: for drafting methods without one of their own; () takes the draft's.
        eagle3: path of an EAGLE-3 checkpoint.

    Raises:
        ValueError: an unknown name, or a method whose checkpoint was not given; names it.
        ImportError: a method's package is missing.
    """
    asked = [parse(word) for word in words]
    for name, _ in asked:
        if name in ("dflash", "zlab") and draft is None:
            raise ValueError(f"methods: {name} needs a DFlash draft of this target; give --draft, or leave {name} out.")
        if name == "eagle3" and eagle3 is None:
            raise ValueError("methods: eagle3 needs an EAGLE-3 checkpoint of the target; give --eagle3 PATH.")
    if draft is not None and not hasattr(draft, "denoise"):
        raise ValueError(f"draft: {draft_path} is no DFlash draft; give an EAGLE-3 checkpoint as --eagle3.")
    base = Engine(model) if any(name in _COMPILED for name, _ in asked) else None
    own = {"eagle3": load_eagle3(eagle3) if "eagle3" in dict(asked) else None, "dflash": draft}
    methods = []
    for name, given in asked:
        for size in _sizes(name, given, block_sizes, draft):
            if name in ("hf", "hf-prompt-lookup"):
                methods.append(HF(name, model, size))
            elif name == "zlab":
                methods.append(ZLab(model, draft_path, size, draft.vocabulary))
            else:
                engine = base if name == "ar" else _engine(base, own.get(name), size)
                methods.append(Compiled(name, model, engine, None if name == "ar" else engine.block_size))
    labels = [method.label for method in methods]
    twice = sorted(label for label in set(labels) if labels.count(label) > 1)
    if twice:
        raise ValueError(f"methods: {', '.join(twice)} named twice; name each once.")
    return methods


def _sizes(name, given, block_sizes, draft):
    """Block sizes to run a method at; None is the method's own."""
    if name in _BLOCKLESS:
        return (None,)
    if given is not None:
        return (given,)
    if block_sizes:
        return tuple(block_sizes)
    return (None if name == "eagle3" else draft.config.block_size if draft is not None else _DEFAULT_BLOCK,)


def _engine(base, draft, block_size):
    """An engine on the target and weights of `base`; without a draft it looks the tokens up in the prompt."""
    if draft is None:
        return Engine(base, PromptLookup(block_size))
    return Engine(base, draft, block_size=block_size)


def load_eagle3(path):
    """An EAGLE-3 draft; ValueError where the checkpoint is another kind."""
    draft = load_draft(path)
    if hasattr(draft, "denoise"):
        raise ValueError(f"eagle3: {path} is a DFlash draft; give an EAGLE-3 checkpoint, or leave eagle3 out.")
    return draft


def shipped_eagle3():
    """Folder of the EAGLE-3 draft that ships for the embedded target, or None."""
    for file in sorted(DRAFT_FOLDER.parent.glob("*/config.json")):
        if is_eagle3(json.loads(file.read_text(encoding="utf-8"))):
            return str(file.parent)
    return None


def main_method(methods):
    """Label of the method that the report's order of tasks is about, or None."""
    for name in _MAIN:
        labels = [method.label for method in methods if method.name == name]
        if labels:
            return labels[-1]
    return None


def skipped(methods, batch_sizes):
    """Sentences about batch sizes that a method cannot run."""
    return [
        f"{method.label} runs batch {method.max_batch} only; batch {size} leaves it out."
        for size in batch_sizes
        for method in methods
        if method.max_batch is not None and size > method.max_batch
    ]


def needs_torch_weights(words):
    """Whether any of the methods runs the target in PyTorch."""
    return any(parse(word)[0] not in _COMPILED for word in words)
