"""`dflash-torchax info`: what a checkpoint is, whether it runs here, and what it fits."""

import json
from pathlib import Path

from . import output, pair
from .output import CliError

_EPILOG = """\
examples:
  dflash-torchax info                                        the embedded pair
  dflash-torchax info z-lab/Qwen3-4B-DFlash-b16              dialect, fields, which targets it fits
  dflash-torchax info ./my-draft --with Qwen/Qwen3-4B        do these two fit?
  dflash-torchax info Qwen/Qwen3-4B --json                   a target: architecture, and whether it can be lowered
Only config.json and the headers of local safetensors files are read, never the weights.
"""

DFLASH, EAGLE3 = "DFlash draft", "EAGLE-3 draft"

# Fields worth showing, in this order, where a config has them.
_FIELDS = (
    "architectures",
    "model_type",
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "aux_hidden_state_layer_ids",
    "num_target_layers",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "draft_vocab_size",
    "max_position_embeddings",
    "sliding_window",
    "layer_types",
    "is_causal",
    "attention_bias",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
    "conv_kernel_size",
    "selector_rank",
    "selector_top_k",
    "tie_word_embeddings",
)


def add_parser(subparsers):
    parser = subparsers.add_parser(
        "info",
        help="what a checkpoint is and what it fits",
        epilog=_EPILOG,
        description="Tell a draft's dialect, fields and fitting targets, or a target's architecture and support.",
    )
    parser.add_argument("checkpoint", nargs="?", metavar="CHECKPOINT", help="folder or repo id; default: the embedded pair")
    parser.add_argument("--with", dest="other", metavar="CHECKPOINT", help="the other half of the pair: check that both fit")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args):
    if args.checkpoint is None:
        if args.other is not None:
            raise CliError("--with: needs a CHECKPOINT to be checked with it.")
        output.quiet_libraries()
        from .. import embedded

        with output.waiting("Looking at the embedded pair ..."):
            first, other = str(embedded.DRAFT_FOLDER), str(embedded.embedded_target_folder())
    else:
        first, other = args.checkpoint, args.other
    output.quiet_libraries()
    about = describe(first, "CHECKPOINT")
    if other is not None:
        about["with"] = describe(other, "--with")
        about["fit"] = fit(about, about["with"])
    if args.json:
        output.print_json(
            {key: value for key, value in about.items() if not key.startswith("_")}
            | ({"with": {k: v for k, v in about["with"].items() if not k.startswith("_")}} if other else {})
        )
    else:
        _show(about)
    return output.EXIT_OK if about.get("fit", {}).get("fits", True) else output.EXIT_ERROR


def describe(path, option):
    """A checkpoint's facts as a dict; keys that begin with '_' are not for printing."""
    folder = _folder(path, option)
    file = folder / "config.json"
    if not file.is_file():
        raise CliError(f"{option}: {path} has no config.json; it is not a checkpoint in Hugging Face layout.")
    try:
        fields = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CliError(f"{option}: {file} is not JSON ({error}).") from error
    tensors = _headers(folder)
    kind, dialect = dialect_of(fields, tensors)
    about = {
        "checkpoint": str(path),
        "kind": kind,
        "dialect": dialect,
        "fields": _chosen(fields),
        "_fields": fields,
        "_tensors": tensors,
        "_folder": folder,
    }
    if tensors:
        about["parameters"] = sum(size for _, size in tensors.values())
        about["dtypes"] = sorted({dtype for dtype, _ in tensors.values()})
    about |= _supported(kind, fields, tensors, folder)
    if kind == DFLASH:
        about["fits"] = _requirements(fields)
    return about


def dialect_of(fields, tensors=()):
    """(kind, dialect) of a config.json: which of the layouts in use for drafts, or a target."""
    nested = fields.get("dflash_config") or {}
    architectures = " ".join(fields.get("architectures") or ())
    names = f"{fields.get('speculators_model_type') or ''} {architectures}".lower()
    if "eagle3" in names or "midlayer.hidden_norm.weight" in tensors:
        return EAGLE3, "speculators" if fields.get("speculators_model_type") else "SafeAILab or vLLM"
    if fields.get("speculators_model_type"):
        return DFLASH, "speculators"
    if "selector_rank" in {**fields, **nested} or "conv_kernel_size" in {**fields, **nested}:
        return DFLASH, "DFlash2 (grouped convolutions, candidate selector)"
    if "encoder.fc.weight" in tensors or ("Assistant" in architectures and "mask_token_id" in fields):
        return DFLASH, "transformers' own assistant (encoder.fc)"
    if nested:
        return DFLASH, "z-lab v1 (fields under dflash_config)"
    if "mask_token_id" in fields and ("target_layer_ids" in fields or "block_size" in fields):
        return DFLASH, "z-lab v1 (fields at the top level)"
    return "target", "Hugging Face"


def fit(one, two):
    """Whether two described checkpoints make a pair: {'fits': bool, 'reason': str}."""
    target, draft = sorted((one, two), key=lambda half: half["kind"] != "target")
    if target["kind"] != "target" or draft["kind"] == "target":
        return {"fits": False, "reason": f"a draft and a target are needed, these are: {one['kind']}, {two['kind']}"}
    for half in (draft, target):
        if not half["supported"]:
            return {"fits": False, "reason": f"{half['checkpoint']}: {half['reason']}"}
    from types import SimpleNamespace

    from transformers import AutoConfig

    text = AutoConfig.from_pretrained(target["_folder"]).get_text_config(decoder=True)
    shape = SimpleNamespace(num_layers=text.num_hidden_layers, hidden_size=text.hidden_size, vocab_size=text.vocab_size)
    try:
        _draft_config(draft["kind"], draft["_fields"], draft["_tensors"]).check_fits(shape)
    except ValueError as error:
        return {"fits": False, "reason": output.one_line(error)}
    return {"fits": True, "reason": "their shapes, taps and ids agree"}


def _draft_config(kind, fields, tensors):
    """The draft's config as `load_draft` reads it; raises what that raises."""
    if kind == EAGLE3:
        from ..eagle3_model import Eagle3Config

        return Eagle3Config.from_dict(fields, own_embedding=any("embed_tokens" in name for name in tensors))
    from ..config import DFlashConfig

    return DFlashConfig.from_dict(fields)


def _folder(path, option):
    pair.check_exists(option, path)
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import hf_hub_download

    with pair.explained(option, path), output.waiting(f"Fetching the config of {path} ..."):
        return Path(hf_hub_download(str(path), "config.json")).parent


def _headers(folder):
    """name -> (dtype, number of elements) from the headers of the folder's safetensors files."""
    from safetensors import SafetensorError, safe_open

    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="np") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (safe_open has no iterator)
                    part, size = tensors.get_slice(name), 1
                    for extent in part.get_shape():
                        size *= extent
                    found[name] = (part.get_dtype(), size)
        except SafetensorError as error:
            raise CliError(f"{file}: not a safetensors file ({output.one_line(error)}); fetch or save it again.") from error
    return found


def _chosen(fields):
    nested = fields.get("dflash_config") or {}
    merged = {**fields, **{name: value for name, value in nested.items() if value is not None}}
    return {name: merged[name] for name in _FIELDS if merged.get(name) is not None}


def _supported(kind, fields, tensors, folder):
    """Whether this version can run it, as {"supported": bool, "reason": str}, and the vocabulary of a draft that has its own."""
    from ..config import read_vocabulary

    try:
        if kind == "target":
            return {"supported": True, "reason": _target_supported(folder)}
        config = _draft_config(kind, fields, tensors)
        ids = read_vocabulary(folder, config) if kind == DFLASH else None
        about = {"supported": True, "reason": "load_draft reads it"}
        return about if ids is None else about | {"draft_vocabulary": f"{len(ids)} ids of its own"}
    except (ValueError, NotImplementedError, KeyError, TypeError) as error:
        return {"supported": False, "reason": output.one_line(error)}


def _target_supported(folder):
    import torch
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    from ..target import Target

    config = AutoConfig.from_pretrained(folder)
    with output.waiting("Tracing the target once, without weights ..."), init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    Target(model, "cpu")
    return "all layers keep a position-addressed KV cache"


def _requirements(fields):
    chosen = _chosen(fields)
    taps = chosen.get("target_layer_ids") or [0]
    depth = f"{chosen['num_target_layers']} layers" if chosen.get("num_target_layers") else f"at least {max(taps) + 1} layers"
    return (
        f"targets of hidden size {chosen.get('hidden_size')}, {depth} and an embedding of more than "
        f"{chosen.get('mask_token_id')} rows, whose hidden states it was trained on"
    )


def _show(about):
    out = output.console()
    for part in (about, about.get("with")):
        if part is None:
            continue
        out.print(part["checkpoint"], style="bold", soft_wrap=True)
        size = f", {part['parameters'] / 1e6:.1f} M parameters ({', '.join(part['dtypes'])})" if part.get("parameters") else ""
        rows = {"kind": part["kind"] + size, "dialect": part["dialect"]}
        rows["runs here"] = f"{'yes' if part['supported'] else 'no'}: {part['reason']}"
        if part.get("fits"):
            rows["fits"] = part["fits"]
        if part.get("draft_vocabulary"):
            rows["guesses among"] = part["draft_vocabulary"]
        rows |= part["fields"]
        for name, value in rows.items():
            out.print(f"  {name:<26} {_brief(value)}", soft_wrap=True)
    if "fit" in about:
        verdict = about["fit"]
        out.print(f"{'They fit' if verdict['fits'] else 'They do not fit'}: {verdict['reason']}", soft_wrap=True)


def _brief(value):
    if isinstance(value, list):
        if len(value) > 8 and len(set(map(str, value))) <= 2:
            return ", ".join(f"{value.count(item)} x {item}" for item in dict.fromkeys(value))
        return ", ".join(map(str, value))
    return value
