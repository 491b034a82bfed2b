"""From names on a command line to methods that can run, or a refusal that names the method and the reason."""

import importlib

from ..engine import Engine
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
_DEFAULT_BLOCK = 8  # for methods without a trained block size
# Which method's acceptance the order of tasks is about, the first that ran.
_MAIN = ("dflash", "eagle3", "zlab", "prompt-lookup", "hf-prompt-lookup")


def make_methods(names, model, draft=None, draft_path=None, block_sizes=(), eagle3=None):
    """The methods, one for each name and block size, all on one copy of the target's weights.

    Args:
        names: keys of `METHODS`.
        model: HF model with its weights in torch where `hf` or `zlab` are named.
        draft, draft_path: a DFlash draft and where it was loaded from.
        block_sizes: for methods that draft; () takes the draft's own.
        eagle3: path of an EAGLE-3 checkpoint.

    Raises:
        ValueError: an unknown name, or a method whose checkpoint was not given; names it.
        ImportError: a method's package is missing.
    """
    for name in names:
        if name not in METHODS:
            raise ValueError(f"methods: {name!r} is not known; choose among {', '.join(METHODS)}.")
        if name in ("dflash", "zlab") and draft is None:
            raise ValueError(f"methods: {name} needs a DFlash draft of this target; give --draft, or leave {name} out.")
        if name == "eagle3" and eagle3 is None:
            raise ValueError("methods: eagle3 needs an EAGLE-3 checkpoint of this target; give --eagle3 PATH, or leave eagle3 out.")
    base, methods = None, []
    trained = draft.config.block_size if draft is not None else _DEFAULT_BLOCK
    for name in names:
        for size in (None,) if name in ("ar", "hf") else tuple(block_sizes) or (None if name == "eagle3" else trained,):
            if name.startswith("hf"):
                methods.append(HF(name, model, size))
            elif name == "zlab":
                methods.append(ZLab(model, draft_path, size))
            else:
                base = base or Engine(model)
                engine = _engine(name, base, draft, size, eagle3)
                methods.append(Compiled(name, model, engine, None if name == "ar" else engine.block_size))
    return methods


def _engine(name, base, draft, block_size, eagle3):
    """An engine on the target and weights of `base`."""
    if name == "ar":
        return base
    shared = (base.decoder.target, base.params.target)
    if name == "prompt-lookup":
        return Engine(None, PromptLookup(block_size), _shared=shared)
    return Engine(None, _load_eagle3(eagle3) if name == "eagle3" else draft, block_size=block_size, _shared=shared)


def _load_eagle3(path):
    try:
        module = importlib.import_module("..eagle3", __package__)
    except ModuleNotFoundError as error:
        raise NotImplementedError("methods: eagle3 is not part of this installation; leave it out.") from error
    return module.load_eagle3(path)


def main_method(methods):
    """Label of the method that the report's order of tasks is about, or None."""
    for name in _MAIN:
        labels = [method.label for method in methods if method.name == name]
        if labels:
            return labels[-1]
    return None


def skipped(methods, batch_sizes):
    """Sentences about batch sizes that a method cannot run."""
    return [f"{method.label} runs batch {method.max_batch} only; batch {size} leaves it out."
            for size in batch_sizes for method in methods if method.max_batch is not None and size > method.max_batch]


def needs_torch_weights(names):
    """Whether any of the methods runs the target in PyTorch."""
    return any(name in ("hf", "hf-prompt-lookup", "zlab") for name in names)
