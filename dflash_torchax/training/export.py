"""Writing a trained draft in the layout that others read."""

import json
import os
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from ..config import VOCABULARY_FILE

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def export_dflash(draft, params, folder, *, dtype=torch.bfloat16, card=None):
    """Write a DFlash draft in z-lab's v1 layout, for `load_draft`, PyPI `dflash` and vLLM.

    Args:
        draft: the `DFlashDraftModel` that was trained (its config is written).
        params: name -> array, its trained parameters.
        folder: created where missing; config.json, model.safetensors, draft_vocabulary.json (and README.md) in it are replaced.
            Killed in between, it is left without config.json, never with the files of two drafts.
        dtype: torch dtype of the written weights.
        card: text of README.md, or None.
    """
    names = {name for name, _ in draft.named_parameters()}
    if names != set(params):
        raise ValueError(f"params: {sorted(names ^ set(params))[:3]} are in only one of params and draft; "
                         f"pass the parameters of this draft.")
    vocabulary = None if draft.vocabulary is None else draft.vocabulary.tolist()
    return write_checkpoint(folder, dflash_fields(draft.config, dtype), params, dtype, card, vocabulary)


def export_eagle3(draft, params, folder, *, dtype=torch.bfloat16, card=None):
    """Write an EAGLE-3 draft in SafeAILab's layout, for `load_draft` and vLLM; arguments as `export_dflash`."""
    config, d2t = draft.config, draft.d2t.numpy()
    t2d = np.zeros(config.backbone.vocab_size, bool)
    t2d[np.arange(len(d2t)) + d2t] = True
    if config.own_embedding:
        params = {**params, "embed_tokens.weight": draft.embed_tokens.weight.detach().float().numpy()}
    fields = backbone_json(config.backbone, dtype) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": config.draft_vocab_size,
        "block_size": config.block_size,
        "norm_before_residual": config.norm_before_residual,
        "tie_word_embeddings": False,
    }
    if config.target_layer_ids is not None:
        # vLLM counts the hidden state before a layer, and reads the ids from the top level.
        ids = [tap + 1 for tap in config.target_layer_ids]
        fields |= {"eagle_aux_hidden_state_layer_ids": ids,
                   "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}}
    if config.target_hidden_size != config.backbone.hidden_size:
        fields["target_hidden_size"] = config.target_hidden_size
    return write_checkpoint(folder, fields, {**params, "d2t": d2t, "t2d": t2d}, dtype, card)


def dflash_fields(config, dtype):
    """A `DFlashConfig` as z-lab's config.json."""
    fields = backbone_json(config.backbone, dtype) | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "dflash_config": {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.target_layer_ids)},
    }
    optional = {
        "input_embedding_scale": (config.input_embedding_scale, 1.0),
        "output_multiplier": (config.output_multiplier, 1.0),
        "final_logit_softcapping": (config.final_logit_softcapping, None),
        "is_causal": (config.is_causal, None),
    }
    return fields | {name: value for name, (value, neutral) in optional.items() if value != neutral}


def backbone_json(backbone, dtype):
    """The transformer dimensions of a draft, spelled as transformers 4 and 5 both read them."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
             "hidden_act", "rms_norm_eps", "max_position_embeddings", "vocab_size", "attention_bias", "attention_dropout",
             "initializer_range", "layer_types", "sliding_window", "use_sliding_window")
    fields = {name: getattr(backbone, name) for name in names if hasattr(backbone, name)}
    rope = dict(backbone.rope_parameters)
    theta = rope.pop("rope_theta")
    scaled = rope.get("rope_type", "default") != "default"
    return fields | {"rope_theta": theta, "rope_scaling": rope if scaled else None, "tie_word_embeddings": True,
                     "dtype": str(dtype).removeprefix("torch.")}


def write_checkpoint(folder, fields, params, dtype, card=None, vocabulary=None):
    """config.json and model.safetensors (draft_vocabulary.json, README.md) of one draft; returns the folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)

    def tensor(value):
        value = torch.from_numpy(np.array(value))
        return value.to(dtype) if value.is_floating_point() else value

    # All written first, then renamed, config.json last: without it the folder is no draft.
    scratch = lambda name: folder / f"writing-{name}"
    texts = {
        "README.md": card,
        VOCABULARY_FILE: None if vocabulary is None else json.dumps(vocabulary) + "\n",
        CONFIG: json.dumps(fields, indent=2) + "\n",
    }
    save_file({name: tensor(value).contiguous() for name, value in params.items()}, scratch(WEIGHTS), metadata={"format": "pt"})
    for name, text in texts.items():
        if text is not None:
            scratch(name).write_text(text)
    for earlier in (CONFIG, VOCABULARY_FILE):
        (folder / earlier).unlink(missing_ok=True)
    for name in (WEIGHTS, *(name for name, text in texts.items() if text is not None)):
        os.replace(scratch(name), folder / name)
    return folder
