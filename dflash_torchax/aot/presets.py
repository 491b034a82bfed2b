"""Configs of published target and draft pairs, written from the models' public architecture.

What the compiler says of a program depends on shapes, layer ids and dtypes only. Where a checkpoint's fact is unknown here and
changes no shape (the UltraChat draft's mask id), any id of the vocabulary stands in for it; such programs are not to be run.
"""

_QWEN3 = {
    "model_type": "qwen3",
    "head_dim": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "attention_bias": False,
    "hidden_act": "silu",
    "dtype": "bfloat16",
}
_QWEN3_4B = {**_QWEN3, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "tie_word_embeddings": True}
_QWEN3_8B = {**_QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "tie_word_embeddings": False}
_LLAMA_31_8B = {
    "model_type": "llama",
    "head_dim": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "hidden_act": "silu",
    "dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


def _draft(target, block_size, mask_token_id, target_layer_ids):
    """z-lab's drafts have five Qwen3 layers of the target's width."""
    fields = {k: target[k] for k in ("hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings")}
    return {
        **_QWEN3,
        **fields,
        "num_hidden_layers": 5,
        "block_size": block_size,
        "num_target_layers": target["num_hidden_layers"],
        "dflash_config": {"mask_token_id": mask_token_id, "target_layer_ids": target_layer_ids},
    }


# name -> (target config, draft config), as config.json would hold them.
PRESETS = {
    "qwen3-4b": (_QWEN3_4B, _draft(_QWEN3_4B, 16, 151669, [1, 9, 17, 25, 33])),
    "qwen3-8b": (_QWEN3_8B, _draft(_QWEN3_8B, 16, 151669, [1, 9, 17, 25, 33])),
    "llama3.1-8b": (_LLAMA_31_8B, _draft(_LLAMA_31_8B, 10, 128255, [1, 8, 15, 22, 29])),
}
# Presets whose draft's mask id is a stand-in.
STAND_INS = {"llama3.1-8b"}
