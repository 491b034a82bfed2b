"""What a program is made of beside its arguments: the configs of target and draft, as JSON values to compare."""

import dataclasses
import json

from transformers import PretrainedConfig

# Fields that no program depends on, beside those that every HF config has.
_NO_PROGRAM = {"max_window_layers", "use_cache", "initializer_range", "pretraining_tp", "num_target_layers", "block_size", "dtype",
               "torch_dtype", "attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id", "architectures", "auto_map"}


def fingerprint_of(engine):
    """Name -> JSON value of everything static that an `engine.Engine` builds its programs from."""
    target, proposer = engine.decoder.target, engine.decoder.proposer
    facts = {
        "draft": type(proposer).__name__,
        "draft.block_size": proposer.block_size,
        "draft.target_layer_ids": list(proposer.taps),
        "cache": repr(engine.decoder.cache),
        "data shards": target.placement.num_data,
        "model shards": target.placement.num_model,
        "target.dtype": str(target.dtype),
        "target.model_type": target.config.model_type,
        "target.tie_word_embeddings": target.config.tie_word_embeddings,
        **_fields("target", target.config),
        **_fields("draft", getattr(engine.draft, "config", None)),
    }
    return json.loads(json.dumps(facts, default=str, sort_keys=True))


def differences(there, here):
    """[(name, value there, value here)] of two fingerprints."""
    return [(name, there.get(name), here.get(name)) for name in sorted({*there, *here}) if there.get(name) != here.get(name)]


def _fields(owner, config):
    """Fields of an HF config, of a dataclass of fields and HF configs, or of nothing."""
    if isinstance(config, PretrainedConfig):
        return {f"{owner}.{name}": value for name, value in _of_hf(config).items()}
    if not dataclasses.is_dataclass(config):
        return {}
    facts = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, PretrainedConfig):
            facts |= _fields(owner, value)
        elif field.name not in _NO_PROGRAM:
            facts[f"{owner}.{field.name}"] = value
    return facts


def _of_hf(config):
    """The fields that this class of config adds to HF's base; what else a config.json says is nobody's."""
    known = set(type(config)().to_dict()) - set(PretrainedConfig().to_dict()) - _NO_PROGRAM - {"model_type", "tie_word_embeddings"}
    return {name: value for name, value in config.to_dict().items() if name in known}
