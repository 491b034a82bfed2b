"""Which of HF's generation arguments are supported; the rest is refused by name, never ignored."""

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria

_OWN_LOOP = "call disable(model) to use HF's own generate for this call"

# GenerationConfig field -> (values that ask for nothing, what to do instead).
_REFUSED = {
    "do_sample": ((None, False), "this version decodes greedily; pass do_sample=False"),
    "num_beams": ((None, 1), f"there is no beam search here; leave it out, or {_OWN_LOOP}"),
    "num_return_sequences": ((None, 1), "greedy decoding has one result; leave it out"),
    "early_stopping": ((None, False), "it belongs to beam search; leave it out"),
    "min_new_tokens": ((None, 0), _OWN_LOOP),
    "min_length": ((None, 0), _OWN_LOOP),
    "max_time": ((None,), _OWN_LOOP),
    "stop_strings": ((None,), _OWN_LOOP),
    "use_mtp": ((None, False), "the draft given to enable() proposes the tokens; leave it out"),
    "cache_implementation": ((None,), "an enabled model brings its own cache; leave it out"),
    "cache_config": ((None,), "an enabled model brings its own cache; leave it out"),
    "max_cache_len": ((None,), "pass max_length to enable() instead"),
    "repetition_penalty": ((None, 1.0), _OWN_LOOP),
    "encoder_repetition_penalty": ((None, 1.0), _OWN_LOOP),
    "no_repeat_ngram_size": ((None, 0), _OWN_LOOP),
    "encoder_no_repeat_ngram_size": ((None, 0), _OWN_LOOP),
    "bad_words_ids": ((None,), _OWN_LOOP),
    "force_words_ids": ((None,), _OWN_LOOP),
    "constraints": ((None,), _OWN_LOOP),
    "forced_bos_token_id": ((None,), _OWN_LOOP),
    "forced_eos_token_id": ((None,), _OWN_LOOP),
    "remove_invalid_values": ((None, False), _OWN_LOOP),
    "exponential_decay_length_penalty": ((None,), _OWN_LOOP),
    "suppress_tokens": ((None,), _OWN_LOOP),
    "begin_suppress_tokens": ((None,), _OWN_LOOP),
    "sequence_bias": ((None,), _OWN_LOOP),
    "token_healing": ((None, False), _OWN_LOOP),
    "guidance_scale": ((None, 1, 1.0), _OWN_LOOP),
    "watermarking_config": ((None,), _OWN_LOOP),
    "output_attentions": ((None, False), "attention weights never leave the compiled program; leave it out"),
    "output_hidden_states": ((None, False), "hidden states never leave the compiled program; leave it out"),
    "output_scores": ((None, False), _OWN_LOOP),
    "output_logits": ((None, False), _OWN_LOOP),
    "return_dict_in_generate": ((None, False), "this version returns the ids; leave it out"),
    "prompt_lookup_num_tokens": ((None,), "the draft given to enable() proposes the tokens; leave it out"),
    "assistant_early_exit": ((None,), "the draft given to enable() proposes the tokens; leave it out"),
    "speculation_type": ((None,), "pass the draft to enable(model, draft) instead"),
    "penalty_alpha": ((None, 0, 0.0), _OWN_LOOP),
    "dola_layers": ((None,), _OWN_LOOP),
    "compile_config": ((None,), "an enabled model is always compiled, by XLA; leave it out"),
    "prefill_chunk_size": ((None,), "an enabled model compiles its own prefill; leave it out"),
}

# model_kwargs that HF's preparation adds or that are honoured.
_KNOWN_INPUTS = ("attention_mask", "position_ids", "use_cache", "cache", "past_key_values", "logits_to_keep")


def refuse_unsupported(generation_config, logits_processor, stopping_criteria, model_kwargs):
    """Raise NotImplementedError naming the first argument that would otherwise be ignored."""
    for name, (neutral, instead) in _REFUSED.items():
        value = getattr(generation_config, name, None)
        if not any(value is n or (type(value) is type(n) and value == n) for n in neutral):
            raise NotImplementedError(f"{name}: {value!r} is not supported; {instead}.")
    for processor in logits_processor:
        raise NotImplementedError(f"logits_processor: {type(processor).__name__} is not supported; {_OWN_LOOP}.")
    for criterion in stopping_criteria:
        if not isinstance(criterion, (MaxLengthCriteria, EosTokenCriteria)):
            raise NotImplementedError(f"stopping_criteria: {type(criterion).__name__} is not supported; {_OWN_LOOP}.")
    for name, value in model_kwargs.items():
        if name not in _KNOWN_INPUTS and value is not None:
            raise NotImplementedError(f"{name}: not supported; leave it out, or {_OWN_LOOP}.")
    for name in ("cache", "past_key_values"):
        if getattr(model_kwargs.get(name), "_is_user_defined", False):
            raise NotImplementedError(f"{name}: an enabled model brings its own cache; leave it out.")
    _refuse_own_positions(model_kwargs)


def _refuse_own_positions(model_kwargs):
    """HF fills position_ids from the mask; other positions would contradict the clock."""
    positions, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
    if positions is None:
        return
    expected = torch.arange(positions.shape[-1]).expand(positions.shape)
    if mask is not None:
        expected = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)
    real = torch.ones_like(expected, dtype=torch.bool) if mask is None else mask != 0
    if positions.shape != expected.shape or not torch.equal(positions[real].cpu(), expected[real].cpu()):
        raise NotImplementedError("position_ids: only positions 0, 1, 2, ... of the unmasked tokens are supported; leave it out.")
