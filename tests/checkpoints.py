"""Tiny checkpoints on disk: a target with a tokenizer, and a draft in z-lab's layout."""

import json

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from dflash_torchax.training.export import export_eagle3

from .test_eagle3 import random_eagle3
from .tiny import MASK_ID, VOCAB, random_draft, tiny_target

TEMPLATE = "{% for m in messages %}{{ 'w1 ' + m['content'] + ' w2 ' }}{% endfor %}"
FIELDS = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "num_target_layers": 4,
    "block_size": 8,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "dflash_config": {"mask_token_id": MASK_ID, "target_layer_ids": [0, 2]},
}


def tiny_tokenizer():
    """Words w0 .. w96, one id each; anything else is w0."""
    words = {f"w{index}": index for index in range(VOCAB)}
    inner = Tokenizer(WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="w0", pad_token="w0", chat_template=TEMPLATE)


def save_target(folder, **overrides):
    """A tiny Llama with its tokenizer; returns the model."""
    model = tiny_target("llama", **overrides)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return model


def save_draft(folder, model, **fields):
    """A random draft for `model`; `fields` replace those of its config."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**FIELDS, **fields}
    draft = random_draft(model, block_size=8)
    save_file({name: tensor.contiguous() for name, tensor in draft.state_dict().items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return draft


def save_eagle3(folder, model):
    """A random EAGLE-3 draft for `model` in SafeAILab's layout."""
    draft = random_eagle3(model)
    export_eagle3(draft, {name: tensor.detach().numpy() for name, tensor in draft.named_parameters()}, folder, dtype=torch.float32)


def greedy(model, prompt, new_tokens, eos=None):
    """HF's own greedy continuation of a list of ids."""
    out = type(model).generate(model, torch.tensor([prompt]), max_new_tokens=new_tokens, do_sample=False, eos_token_id=eos)
    return out[0, len(prompt) :].tolist()
