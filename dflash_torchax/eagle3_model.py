"""The EAGLE-3 draft as an `nn.Module` with SafeAILab's parameter names (arXiv 2503.01840), and its config.

One decoder layer that reads [embedding of the next token, fused hidden state] and hands its own output on as the next
hidden state. Attention and its cache come in from outside (`attend`), as for the DFlash draft.
"""

import dataclasses

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

DEFAULT_BLOCK_SIZE = 4  # anchor and three drafted tokens; a checkpoint of this kind names no number


@dataclasses.dataclass(frozen=True)
class Eagle3Config:
    """What an EAGLE-3 draft is.

    Fields:
        backbone: dimensions of its layer, as an HF `LlamaConfig`.
        draft_vocab_size: rows of its own head; below the target's vocabulary they are mapped by `d2t`.
        target_layer_ids: taps, 0-based target layers whose outputs are fused; None takes the usual three.
        target_hidden_size: width of one tap.
        norm_before_residual: whether the layer's residual is the normed hidden state (speculators' variant).
        fc_bias: whether `fc` has a bias.
        own_embedding: whether the checkpoint brings its own input embedding.
        block_size: anchor and drafted tokens of a step, unless the caller chooses.
    """

    backbone: LlamaConfig
    draft_vocab_size: int
    target_layer_ids: tuple[int, ...] | None
    target_hidden_size: int
    norm_before_residual: bool = False
    fc_bias: bool = False
    own_embedding: bool = False
    block_size: int = DEFAULT_BLOCK_SIZE

    @classmethod
    def from_dict(cls, fields, **found):
        """Parse config.json of SafeAILab's, vLLM's or speculators' layout; `found` is what only the tensors tell.

        Raises:
            NotImplementedError: more than one layer, or another kind of attention.
        """
        layer = fields.get("transformer_layer_config") or fields
        eagle = fields.get("eagle_config") or {}
        backbone = LlamaConfig(**{k: v for k, v in layer.items() if k not in ("architectures", "model_type", "eagle_config")})
        if backbone.num_hidden_layers != 1:
            raise NotImplementedError(f"num_hidden_layers: {backbone.num_hidden_layers}; an EAGLE-3 draft of one layer is read.")
        aux = eagle.get("eagle_aux_hidden_state_layer_ids") or fields.get("eagle_aux_hidden_state_layer_ids")
        methods = (fields.get("speculators_config") or {}).get("proposal_methods") or [{}]
        drafted = methods[0].get("speculative_tokens")
        return cls(
            backbone=backbone,
            draft_vocab_size=int(fields.get("draft_vocab_size") or backbone.vocab_size),
            # vLLM counts the hidden state BEFORE a layer: id i is the output of layer i - 1.
            target_layer_ids=None if not aux else tuple(int(i) - 1 for i in aux),
            target_hidden_size=int(fields.get("target_hidden_size") or backbone.hidden_size),
            norm_before_residual=bool(fields.get("norm_before_residual", False)),
            block_size=int(fields.get("block_size") or (drafted + 1 if drafted else DEFAULT_BLOCK_SIZE)),
            **found,
        )

    @property
    def num_taps(self):
        return 3 if self.target_layer_ids is None else len(self.target_layer_ids)

    def taps_for(self, num_target_layers):
        """The taps on a target of that depth: the checkpoint's, else SafeAILab's low, middle and high."""
        if self.target_layer_ids is not None:
            return self.target_layer_ids
        return usual_taps(num_target_layers)

    def check_fits(self, target):
        """Raise ValueError where this draft does not fit `target` (a `target.Target`)."""
        for tap in self.taps_for(target.num_layers):
            if not 0 <= tap < target.num_layers:
                raise ValueError(f"eagle_aux_hidden_state_layer_ids: layer {tap + 1} of a target with {target.num_layers} layers; "
                                 f"use the target this draft was trained for.")
        if self.target_hidden_size != target.hidden_size:
            raise ValueError(f"target_hidden_size: {self.target_hidden_size} in the draft, {target.hidden_size} in the target; "
                             f"use the target this draft was trained for.")
        if not self.own_embedding and self.backbone.hidden_size != target.hidden_size:
            raise ValueError(f"hidden_size: {self.backbone.hidden_size} in the draft, {target.hidden_size} in the target; a "
                             f"draft without its own embedding reads the target's, so both must be equal.")


def usual_taps(num_target_layers):
    """SafeAILab's taps: the inputs of layers 2, L/2 and L-3, that is the outputs of the layers before them."""
    depth = num_target_layers
    if depth < 4:
        raise ValueError(f"target_layer_ids: a target of {depth} layers is too shallow for EAGLE-3's usual taps; name three.")
    return (1, depth // 2 - 1, depth - 4)


def is_eagle3(fields):
    """Whether a config.json belongs to an EAGLE-3 draft."""
    names = [fields.get("speculators_model_type") or "", *(fields.get("architectures") or ())]
    return any("eagle3" in name.lower() for name in names)


class Eagle3Attention(nn.Module):
    """Llama attention that reads twice the hidden size: the token's embedding beside the hidden state."""

    layer_idx = 0

    def __init__(self, config):
        super().__init__()
        hidden, heads = config.hidden_size, config.num_attention_heads
        self.head_dim = getattr(config, "head_dim", None) or hidden // heads
        kv_heads, bias = config.num_key_value_heads, config.attention_bias
        self.q_proj = nn.Linear(2 * hidden, heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(2 * hidden, kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(2 * hidden, kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * self.head_dim, hidden, bias=bias)

    def forward(self, hidden, cos, sin, attend):
        shape = (*hidden.shape[:-1], -1, self.head_dim)
        query, key, value = (proj(hidden).view(shape).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        out = attend(self, query, key, value)
        return self.o_proj(out.reshape(*hidden.shape[:-1], -1))


class Eagle3Layer(nn.Module):
    """The draft's one decoder layer."""

    def __init__(self, config):
        super().__init__()
        backbone = config.backbone
        self.norm_before_residual = config.norm_before_residual
        self.self_attn = Eagle3Attention(backbone)
        self.mlp = LlamaMLP(backbone)
        for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
            setattr(self, name, LlamaRMSNorm(backbone.hidden_size, eps=backbone.rms_norm_eps))

    def forward(self, embedded, hidden, cos, sin, attend):
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        both = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        hidden = residual + self.self_attn(both, cos, sin, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3DraftModel(nn.Module):
    """EAGLE-3 draft: fuses three hidden states of the target, then drafts token by token.

    Args:
        config: an `Eagle3Config`.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        backbone = config.backbone
        self.fc = nn.Linear(config.num_taps * config.target_hidden_size, backbone.hidden_size, bias=config.fc_bias)
        self.midlayer = Eagle3Layer(config)
        self.norm = LlamaRMSNorm(backbone.hidden_size, eps=backbone.rms_norm_eps)
        self.lm_head = nn.Linear(backbone.hidden_size, config.draft_vocab_size, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(backbone)
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(backbone.vocab_size, backbone.hidden_size)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))

    def fuse(self, feature):
        """[batch, width, taps * target hidden] -> [batch, width, hidden], what the layer reads for a slot."""
        return self.fc(feature)

    def advance(self, embedded, hidden, position_ids, attend):
        """One pass of the layer.

        Args:
            embedded: [batch, width, hidden], embeddings of the token AFTER each slot.
            hidden: [batch, width, hidden], fused features, or the layer's own outputs.
            position_ids: [batch, width], the slots.
            attend: as for `DFlashDraftModel.denoise`.

        Returns:
            [batch, width, hidden], un-normed.
        """
        cos, sin = self.rotary_emb(hidden, position_ids)
        return self.midlayer(embedded, hidden, cos, sin, attend)

    def logits(self, hidden):
        """[..., hidden] of `advance` -> [..., draft_vocab]; row i is target token i + d2t[i]."""
        return self.lm_head(self.norm(hidden))
