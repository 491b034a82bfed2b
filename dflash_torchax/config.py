"""`DFlashConfig`: a draft checkpoint's config.json, read loudly. z-lab v1 layout, nested or top-level fields."""

import dataclasses
import json
import logging

from transformers import Qwen3Config

logger = logging.getLogger(__name__)

DEFAULT_BLOCK_SIZE = 16  # z-lab's default where a checkpoint names none
# Beside config.json where a draft guesses among some of the target's ids only; others that read z-lab's layout ignore it.
VOCABULARY_FILE = "draft_vocabulary.json"

# Fields that mark a dialect this reader does not speak yet -> what it is.
_OTHER_DIALECTS = {
    "speculators_model_type": "the speculators format",
    "selector_rank": "DFlash2 (candidate selector)",
    "conv_kernel_size": "DFlash2 (grouped convolutions)",
}


@dataclasses.dataclass(frozen=True)
class DFlashConfig:
    """What a DFlash draft is.

    Fields:
        block_size: slots of a block, the anchor and block_size - 1 masks.
        mask_token_id: id whose target embedding fills the masked slots.
        target_layer_ids: taps, 0-based target layers whose outputs make the context feature.
        num_target_layers: depth of the target it was trained for, or None when the checkpoint does not say.
        backbone: the draft's own transformer dimensions, as an HF `Qwen3Config`.
        input_embedding_scale, output_multiplier, final_logit_softcapping: z-lab's optional scalings.
        is_causal: overrides the attention inside the block (None: sliding layers causal, full layers not).
    """

    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    backbone: Qwen3Config
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    is_causal: bool | None = None

    @classmethod
    def from_dict(cls, fields):
        """Parse a config.json dict; `dflash_config[name]` wins over the top level.

        Raises:
            ValueError: a field is missing, underivable or out of range; the message names it and the way out.
            NotImplementedError: another checkpoint dialect.
        """
        nested = fields.get("dflash_config") or {}

        def get(name, default=None):
            value = nested.get(name, fields.get(name))
            return default if value is None else value

        for name, dialect in _OTHER_DIALECTS.items():
            if get(name) is not None:
                raise NotImplementedError(
                    f"{name}: this checkpoint uses {dialect}; only the z-lab v1 layout is read. Convert it to that layout."
                )
        mask_token_id = get("mask_token_id")
        if mask_token_id is None:
            raise ValueError("mask_token_id: missing from the draft's config; add it under dflash_config in config.json.")
        backbone = Qwen3Config(**{k: v for k, v in fields.items() if k not in ("dflash_config", "architectures")})
        config = cls(
            block_size=int(get("block_size", DEFAULT_BLOCK_SIZE)),
            mask_token_id=int(mask_token_id),
            target_layer_ids=_taps(get),
            num_target_layers=get("num_target_layers"),
            backbone=backbone,
            input_embedding_scale=float(get("input_embedding_scale", 1.0)),
            output_multiplier=float(get("output_multiplier", 1.0)),
            final_logit_softcapping=get("final_logit_softcapping"),
            is_causal=get("is_causal"),
        )
        if config.block_size < 1:
            raise ValueError(f"block_size: {config.block_size} in the draft's config; it must be at least 1.")
        for tap in config.target_layer_ids:
            if tap < 0:
                raise ValueError(f"target_layer_ids: {list(config.target_layer_ids)} contains the negative id {tap}; "
                                 f"taps are 0-based target layers, write them out as such.")
        return config

    def check_fits(self, target):
        """Raise ValueError where this draft does not fit `target` (a `target.Target`)."""
        depth, hidden = target.num_layers, target.hidden_size
        for tap in self.target_layer_ids:
            if tap >= depth:
                raise ValueError(f"target_layer_ids: {list(self.target_layer_ids)} names layer {tap}, but the target has "
                                 f"{depth} layers (0..{depth - 1}); use the target this draft was trained for.")
        if self.num_target_layers not in (None, depth):
            raise ValueError(f"num_target_layers: the draft was trained for a target of {self.num_target_layers} layers, "
                             f"this one has {depth}; use the target this draft was trained for.")
        if self.backbone.hidden_size != hidden:
            raise ValueError(f"hidden_size: {self.backbone.hidden_size} in the draft, {hidden} in the target; the draft reads "
                             f"the target's hidden states and embeddings, so both must be equal.")
        if not 0 <= self.mask_token_id < target.vocab_size:
            raise ValueError(f"mask_token_id: {self.mask_token_id} is outside the target's embedding of {target.vocab_size} "
                             f"rows; resize the target's embedding or correct the id.")


def read_vocabulary(folder, config):
    """The ids a DFlash draft guesses among, an ascending list, from the file beside its config; None where there is none.

    Raises:
        ValueError: the file holds anything else.
    """
    file, vocab_size = folder / VOCABULARY_FILE, config.backbone.vocab_size
    if not file.is_file():
        return None
    ids = json.loads(file.read_text())
    whole = isinstance(ids, list) and bool(ids) and all(type(i) is int for i in ids)
    if not whole or ids != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= vocab_size:
        raise ValueError(f"{VOCABULARY_FILE}: {file} must list different ids in 0..{vocab_size - 1} in ascending order; "
                         f"write it again, or delete it: the draft then guesses among all ids.")
    return ids


def _taps(get):
    taps = get("target_layer_ids")
    if taps is not None:
        if not taps:
            raise ValueError("target_layer_ids: [] in the draft's config; a draft needs at least one tap.")
        return tuple(int(tap) for tap in taps)
    depth, count = get("num_target_layers"), get("num_hidden_layers")
    if depth is None or count is None:
        raise ValueError("target_layer_ids: missing, and not derivable without num_target_layers and num_hidden_layers; "
                         "add the taps under dflash_config in config.json.")
    taps = evenly_spaced_taps(depth, count)
    logger.warning("target_layer_ids: missing from the draft's config; using %s, evenly spaced over %d layers", list(taps), depth)
    return taps


def evenly_spaced_taps(num_target_layers, count):
    """z-lab's default: one tap in the middle, else `count` taps from layer 1 to num_target_layers - 3."""
    if count == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (count - 1)) for i in range(count))
