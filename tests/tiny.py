"""Tiny random targets of many architectures, and drafts for them: random, perfect, always wrong."""

import jax.numpy as jnp
import numpy as np
import torch
import transformers

from dflash_torchax.config import DFlashConfig
from dflash_torchax.draft_model import DFlashDraftModel
from dflash_torchax.proposers import Proposal

VOCAB = 97
MASK_ID = 5
_COMMON = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": VOCAB, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}
_LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]

# name -> (config class, fields beyond _COMMON)
ARCHITECTURES = {
    "llama": (transformers.LlamaConfig, {}),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen2_sliding": (transformers.Qwen2Config, {"use_sliding_window": True, "sliding_window": 6, "layer_types": _LAYER_TYPES}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16}),
    "mistral": (transformers.MistralConfig, {"sliding_window": 7}),
    "smollm3": (transformers.SmolLM3Config, {"no_rope_layers": [1, 1, 1, 0]}),
    "olmo2": (transformers.Olmo2Config, {}),
    "phi3": (transformers.Phi3Config, {"sliding_window": 9}),
    "gemma2": (transformers.Gemma2Config, {
        "head_dim": 16, "sliding_window": 5, "layer_types": _LAYER_TYPES, "query_pre_attn_scalar": 16,
        "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0,
    }),
    "granite": (transformers.GraniteConfig, {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.7,
                                             "attention_multiplier": 0.2}),
    "gpt_neox": (transformers.GPTNeoXConfig, {}),
}


def tiny_target(name="llama", seed=0, **overrides):
    """A float32 random model of an architecture, with weights large enough for varied greedy output."""
    config_class, fields = ARCHITECTURES[name]
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config_class(**{**_COMMON, **fields, **overrides})).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.6 if "embed" in parameter_name else 0.25)
    model.generation_config.eos_token_id = None
    return model


def random_draft(model, block_size=8, taps=(0, 2), layers=2, seed=1, **fields):
    """A DFlash draft with random weights for `model`."""
    config = DFlashConfig.from_dict({
        "hidden_size": model.config.hidden_size, "intermediate_size": 48, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCAB, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "max_position_embeddings": 512, "block_size": block_size,
        "dflash_config": {"mask_token_id": MASK_ID, "target_layer_ids": list(taps)}, **fields,
    })
    torch.manual_seed(seed)
    draft = DFlashDraftModel(config).eval()
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.25)
    return draft


class ScriptedProposer:
    """Drafts tokens from a script: row b proposes script[b, position], shifted by `offset` (0: perfect, else wrong).

    Args:
        script: int [batch, length], the target's own output for each row, right-padded (row = prompt + new).
        offset: added to each proposed id modulo the vocabulary.
    """

    def __init__(self, script, block_size, offset=0, vocab_size=VOCAB):
        self.params = jnp.asarray(script, jnp.int32)
        self.block_size, self.offset, self.vocab_size = block_size, offset, vocab_size
        self.taps = ()

    def create_cache(self, batch_size, slots):
        return ()

    def inject(self, params, cache, feature, starts, positions):
        return cache

    def propose(self, params, target_params, state):
        index = jnp.minimum(state.positions(self.block_size)[:, 1:], params.shape[1] - 1)
        tokens = jnp.take_along_axis(params[: index.shape[0]], index, axis=1)
        return Proposal((tokens + self.offset) % self.vocab_size, state.draft_cache)


def left_padded(prompts, pad_id=0):
    """Lists of ids -> (input_ids, attention_mask), left-padded as HF tokenizers do."""
    width = max(len(p) for p in prompts)
    ids = torch.full((len(prompts), width), pad_id)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return ids, mask


def scripts(model, prompts, new_tokens, **kwargs):
    """HF's greedy continuation of each prompt alone, prompt included, as one right-padded array."""
    rows = [model.generate(torch.tensor([p]), max_new_tokens=new_tokens, do_sample=False, **kwargs)[0].numpy() for p in prompts]
    script = np.zeros((len(rows), max(len(r) for r in rows)), np.int32)
    for out, row in zip(script, rows, strict=True):
        out[: len(row)] = row
    return script


def random_prompts(lengths, seed=0):
    generator = np.random.default_rng(seed)
    return [generator.integers(6, VOCAB, n).tolist() for n in lengths]


def assert_step_is_torch_s(draft, theirs, loss, gradient, updated):
    """Loss, gradient and the parameters after one AdamW step (rate 1e-2, decay 0.1) equal what torch makes of `theirs`."""
    theirs.backward()
    np.testing.assert_allclose(float(loss), float(theirs.detach()), rtol=1e-5)
    for name, parameter in draft.named_parameters():
        np.testing.assert_allclose(gradient[name], parameter.grad, atol=1e-4, err_msg=name)
    torch.optim.AdamW(draft.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-8).step()
    for name, parameter in draft.named_parameters():
        np.testing.assert_allclose(updated[name], parameter.detach(), atol=1e-4, err_msg=name)
