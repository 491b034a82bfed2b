"""The DFlash draft as an `nn.Module` with z-lab's parameter names (arXiv 2602.06036).

Attention and its cache come in from outside (`attend`), so that the same module can run on another engine's cache.
"""

import torch
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)


class DFlashAttention(nn.Module):
    """Projections of one draft layer; the context's K/V depend on the context feature alone."""

    def __init__(self, config, layer_idx):
        super().__init__()
        backbone = config.backbone
        self.layer_idx = layer_idx
        self.head_dim = backbone.head_dim
        heads, kv_heads = backbone.num_attention_heads, backbone.num_key_value_heads
        bias = backbone.attention_bias
        self.q_proj = nn.Linear(backbone.hidden_size, heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(backbone.hidden_size, kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(backbone.hidden_size, kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * self.head_dim, backbone.hidden_size, bias=bias)
        self.q_norm = Qwen3RMSNorm(self.head_dim, eps=backbone.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, eps=backbone.rms_norm_eps)
        sliding = (backbone.layer_types or ["full_attention"] * (layer_idx + 1))[layer_idx] == "sliding_attention"
        self.sliding_window = backbone.sliding_window if sliding else None
        self.is_causal = sliding if config.is_causal is None else bool(config.is_causal)

    def key_value(self, hidden, cos, sin):
        """[batch, width, hidden] -> key, value [batch, kv_heads, width, head_dim], key rotated."""
        shape = (*hidden.shape[:-1], -1, self.head_dim)
        key = self.k_norm(self.k_proj(hidden).view(shape)).transpose(1, 2)
        value = self.v_proj(hidden).view(shape).transpose(1, 2)
        return apply_rotary_pos_emb(key, key, cos, sin)[1], value

    def forward(self, hidden, cos, sin, attend):
        shape = (*hidden.shape[:-1], -1, self.head_dim)
        query = self.q_norm(self.q_proj(hidden).view(shape)).transpose(1, 2)
        query = apply_rotary_pos_emb(query, query, cos, sin)[0]
        out = attend(self, query, *self.key_value(hidden, cos, sin))
        return self.o_proj(out.reshape(*hidden.shape[:-1], -1))


class DFlashLayer(nn.Module):
    """Pre-norm transformer layer around `DFlashAttention`."""

    def __init__(self, config, layer_idx):
        super().__init__()
        self.self_attn = DFlashAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config.backbone)
        self.input_layernorm = Qwen3RMSNorm(config.backbone.hidden_size, eps=config.backbone.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.backbone.hidden_size, eps=config.backbone.rms_norm_eps)

    def forward(self, hidden, cos, sin, attend):
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class DFlashDraftModel(nn.Module):
    """Block-diffusion draft: one forward over [anchor, mask, ...] proposes a whole block.

    Embedding and head are the target's. Parameter names are those of z-lab's v1 checkpoints.

    Args:
        config: a `DFlashConfig`.
        vocabulary: target ids it guesses among, ascending int64 [n]; None guesses among all.
    """

    def __init__(self, config, vocabulary=None):
        super().__init__()
        self.config = config
        self.register_buffer("vocabulary", vocabulary, persistent=False)
        backbone = config.backbone
        self.layers = nn.ModuleList(DFlashLayer(config, i) for i in range(backbone.num_hidden_layers))
        self.norm = Qwen3RMSNorm(backbone.hidden_size, eps=backbone.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(backbone)
        self.fc = nn.Linear(len(config.target_layer_ids) * backbone.hidden_size, backbone.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(backbone.hidden_size, eps=backbone.rms_norm_eps)

    def inject_context(self, feature, position_ids):
        """Context feature -> each layer's context K/V.

        Args:
            feature: [batch, width, taps * hidden], the target's tapped hidden states.
            position_ids: [batch, width].

        Returns:
            list of (key, value), each [batch, kv_heads, width, head_dim].
        """
        context = self.hidden_norm(self.fc(feature))
        cos, sin = self.rotary_emb(context, position_ids)
        return [layer.self_attn.key_value(context, cos, sin) for layer in self.layers]

    def denoise(self, noise_embedding, position_ids, attend):
        """One pass over the block.

        Args:
            noise_embedding: [batch, block_size, hidden], target embeddings of [anchor, mask, ...].
            position_ids: [batch, block_size].
            attend: function (attention module, query [batch, heads, width, head_dim], key, value of the block)
                -> [batch, width, heads, head_dim]; it owns the context cache and the mask.

        Returns:
            [batch, block_size, hidden] normed hidden states, ready for the target's output embedding.
        """
        hidden = noise_embedding
        cos, sin = self.rotary_emb(hidden, position_ids)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin, attend)
        return self.norm(hidden)

    def finish_logits(self, logits):
        """z-lab's output scaling and soft-cap on the bare output embedding's logits."""
        logits = logits * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return logits if not cap else torch.tanh(logits / cap) * cap
