"""New drafts for a target: dimensions from its config, weights from its last layers where they have the same shape."""

import copy
import dataclasses

import torch

from ..config import DFlashConfig, evenly_spaced_taps
from ..draft_model import DFlashDraftModel
from ..eagle3_model import Eagle3Config, Eagle3DraftModel, usual_taps


def new_dflash(model, *, block_size, mask_token_id, layers=2, taps=None, window=None, seed=0):
    """A DFlash draft for `model`, initialised from its last layers.

    Args:
        model: HF target on the CPU.
        block_size: slots of a block, anchor included.
        mask_token_id: an id of the target's embedding that its text does not use.
        layers: depth of the draft.
        taps: target layers to read; None takes z-lab's rule for five taps (fewer in shallow targets).
        window: sliding window of every draft layer, or None for full attention.
        seed: of the tensors that have no counterpart in the target.
    """
    target = model.config.get_text_config(decoder=True)
    depth = target.num_hidden_layers
    if taps is None:
        taps = sorted(set(evenly_spaced_taps(depth, min(5, max(depth - 3, 1)))))
    fields = backbone_fields(target) | {
        "num_hidden_layers": layers,
        "num_target_layers": depth,
        "block_size": block_size,
        "dflash_config": {"mask_token_id": mask_token_id, "target_layer_ids": list(taps)},
        "final_logit_softcapping": getattr(target, "final_logit_softcapping", None),
    }
    if window is not None:
        fields |= {"use_sliding_window": True, "sliding_window": window, "layer_types": ["sliding_attention"] * layers}
    torch.manual_seed(seed)
    draft = DFlashDraftModel(DFlashConfig.from_dict(fields)).eval()
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, getattr(target, "initializer_range", 0.02))
        average_of_taps(draft.fc.weight, len(taps))
        for index, layer in enumerate(draft.layers):
            copy_matching(model, layer, depth - layers + index)
        copy_final_norm(model, draft.norm)
    return draft


def deepened(draft, layers):
    """A DFlash draft with `layers` layers that starts out computing what `draft` computes; None leaves it as it is.

    The layers added on top are copies of its last one that contribute nothing yet: their output projections are zero.

    Raises:
        ValueError: `draft` is deeper already, or no DFlash draft.
    """
    depth = draft.config.backbone.num_hidden_layers
    if layers in (None, depth):
        return draft
    if not isinstance(draft, DFlashDraftModel) or layers < depth:
        raise ValueError(f"layers: {layers}, but the {type(draft).__name__} to start from has {depth}; only DFlash drafts grow.")
    backbone = copy.deepcopy(draft.config.backbone)
    backbone.num_hidden_layers = layers
    if backbone.layer_types is not None:
        backbone.layer_types = [*backbone.layer_types, *backbone.layer_types[-1:] * (layers - depth)]
    deeper = DFlashDraftModel(dataclasses.replace(draft.config, backbone=backbone), draft.vocabulary).eval()
    deeper.load_state_dict(draft.state_dict(), strict=False)
    with torch.no_grad():
        for layer in deeper.layers[depth:]:
            layer.load_state_dict(draft.layers[-1].state_dict())
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return deeper


def new_eagle3(model, *, block_size, vocabulary, taps=None, seed=0):
    """An EAGLE-3 draft for `model`, initialised from its last layer and its head.

    Args:
        model: HF target on the CPU.
        block_size: anchor and the tokens of a chain.
        vocabulary: int array, ascending: target ids the draft's head has rows for.
        taps: three target layers to fuse; None takes SafeAILab's.
        seed: of the tensors that have no counterpart in the target.
    """
    target = model.config.get_text_config(decoder=True)
    taps = usual_taps(target.num_hidden_layers) if taps is None else tuple(taps)
    fields = backbone_fields(target) | {
        "num_hidden_layers": 1, "draft_vocab_size": len(vocabulary), "block_size": block_size,
        "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in taps],
    }
    torch.manual_seed(seed)
    draft = Eagle3DraftModel(Eagle3Config.from_dict(fields)).eval()
    ids = torch.from_numpy(vocabulary).long()
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, getattr(target, "initializer_range", 0.02))
        average_of_taps(draft.fc.weight, len(taps))
        copy_matching(model, draft.midlayer, target.num_hidden_layers - 1)
        copy_final_norm(model, draft.norm)
        draft.lm_head.weight.copy_(model.get_output_embeddings().weight[ids])
        draft.d2t.copy_(ids - torch.arange(len(ids)))
    return draft


def backbone_fields(target):
    """Dimensions a draft shares with its target, as config.json spells them."""
    heads = target.num_attention_heads
    rope = getattr(target, "rope_parameters", None) or {}
    theta = rope.get("rope_theta") or getattr(target, "rope_theta", None) or 10000.0
    return {
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(target, "num_key_value_heads", None) or heads,
        "head_dim": getattr(target, "head_dim", None) or target.hidden_size // heads,
        "rms_norm_eps": getattr(target, "rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "max_position_embeddings": target.max_position_embeddings,
        "vocab_size": target.vocab_size,
        "hidden_act": "silu",
        "attention_bias": False,
    }


def average_of_taps(weight, count):
    """Start `fc` as the mean of the taps: its input then has the scale of one hidden state."""
    hidden = weight.shape[0]
    weight.copy_(torch.eye(hidden).repeat(1, count) / count)


def copy_matching(model, layer, index):
    """Copy into `layer` every tensor of the target's layer `index` that has the same name and shape."""
    source = dict(model.named_parameters())
    for name, parameter in layer.named_parameters():
        for candidate, tensor in source.items():
            if candidate.endswith(f"layers.{index}.{name}") and tensor.shape == parameter.shape:
                parameter.copy_(tensor)


def copy_final_norm(model, norm):
    """Copy the weight of the target's final norm, where there is one of that shape."""
    final = getattr(model.base_model, "norm", None)
    weight = getattr(final, "weight", None)
    if weight is not None and weight.shape == norm.weight.shape:
        norm.weight.copy_(weight)
