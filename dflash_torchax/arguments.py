"""Which of HF's generation arguments are supported, which take the host path, and which are refused by name.

The tables are complete: a test walks the installed transformers' parameters and fails on one that is in none of them.
"""

from typing import NamedTuple

import torch

from .session import GenerationCache

_HF = "call disable(model) to use HF's own generate for this call"
_DRAFT = "the draft given to enable() proposes the tokens; leave it out"
_CACHE = "an enabled model brings its own cache; leave it out"


class Argument(NamedTuple):
    """How an argument is served: "supported", "host path" or "refused"; a note; values that ask for nothing."""

    kind: str
    note: str = ""
    neutral: tuple = ()


def _yes(note=""):
    return Argument("supported", note)


def _host(note=""):
    return Argument("host path", note)


def _no(instead, *neutral):
    return Argument("refused", instead, (None, *neutral))


# Fields of GenerationConfig.
CONFIG = {
    "max_length": _yes(), "max_new_tokens": _yes(), "min_length": _yes(), "min_new_tokens": _yes(), "max_time": _yes("per token"),
    "stop_strings": _yes("with tokenizer="), "do_sample": _yes(), "use_cache": _yes("no effect on the output"),
    "temperature": _yes(), "top_k": _yes(), "top_p": _yes(), "min_p": _yes(), "typical_p": _yes(), "epsilon_cutoff": _yes(),
    "eta_cutoff": _yes(), "top_h": _host(), "repetition_penalty": _yes(), "no_repeat_ngram_size": _yes(), "bad_words_ids": _yes(),
    "encoder_repetition_penalty": _host(), "encoder_no_repeat_ngram_size": _host(), "renormalize_logits": _yes(),
    "forced_bos_token_id": _yes(), "forced_eos_token_id": _yes(), "remove_invalid_values": _yes(),
    "exponential_decay_length_penalty": _yes(), "suppress_tokens": _yes(), "begin_suppress_tokens": _yes(), "sequence_bias": _yes(),
    "guidance_scale": _host("runs the torch model for the unconditional branch"), "watermarking_config": _host(),
    "num_return_sequences": _yes("with do_sample, as in HF"), "return_dict_in_generate": _yes("adds stats and a reusable cache"),
    "output_scores": _host(), "output_logits": _host(), "pad_token_id": _yes(), "bos_token_id": _yes(), "eos_token_id": _yes(),
    "length_penalty": _yes("no effect without beams, as in HF"), "early_stopping": _yes("no effect without beams, as in HF"),
    "decoder_start_token_id": _yes("no effect on decoder-only models, as in HF"), "is_assistant": _yes("HF's own bookkeeping"),
    "disable_compile": _yes("no effect: this is XLA, not torch.compile"),
    "speculation_type": Argument("supported", '"dflash", with a draft; others are refused', (None, "dflash")),
    "num_beams": _no(f"there is no beam search here; leave it out, or {_HF}", 1),
    "num_beam_groups": _no(f"there is no beam search here; leave it out, or {_HF}", 1),
    "diversity_penalty": _no(f"there is no beam search here; leave it out, or {_HF}", 0.0),
    "constraints": _no(f"there is no beam search here; leave it out, or {_HF}"),
    "force_words_ids": _no(f"there is no beam search here; leave it out, or {_HF}"),
    "penalty_alpha": _no(f"there is no contrastive search here; {_HF}", 0, 0.0),
    "dola_layers": _no(_HF), "low_memory": _no(_HF, False), "token_healing": _no(_HF, False), "use_mtp": _no(_DRAFT, False),
    "output_attentions": _no(f"attention weights never leave the compiled program; leave it out, or {_HF}", False),
    "output_hidden_states": _no(f"hidden states never leave the compiled program; leave it out, or {_HF}", False),
    "prompt_lookup_num_tokens": _no(_DRAFT), "max_matching_ngram_size": _no(_DRAFT, 2), "assistant_early_exit": _no(_DRAFT),
    "num_assistant_tokens": _no("the block size is set by enable(block_size=...); leave it out", 20),
    "num_assistant_tokens_schedule": _no("the block size is set by enable(block_size=...); leave it out", "constant"),
    "assistant_confidence_threshold": _no(_DRAFT, 0.4), "assistant_lookbehind": _no(_DRAFT, 10),
    "target_lookbehind": _no(_DRAFT, 10), "assistant_ensemble_weight": _no(_DRAFT, 0.0),
    "cache_implementation": _no(_CACHE), "cache_config": _no(_CACHE), "max_cache_len": _no("pass max_length to enable() instead"),
    "compile_config": _no("an enabled model is always compiled, by XLA; leave it out"),
    "continuous_batching_config": _no(_HF),
    "prefill_chunk_size": _no("an enabled model compiles its own prefill; leave it out"),
}

# Arguments of generate() itself, and the model inputs it passes on.
CALL = {
    "inputs": _yes("ids [batch, length], left-padded"), "input_ids": _yes(), "attention_mask": _yes("left padding"),
    "generation_config": _yes(), "logits_processor": _host("HF's built-in classes run on the device"),
    "stopping_criteria": _yes("per token"), "prefix_allowed_tokens_fn": _host(), "streamer": _yes(),
    "assistant_model": _yes("a DFlash draft"), "tokenizer": _yes("for stop_strings"),
    "cache": _yes("the cache of an earlier output"), "past_key_values": _yes("the cache of an earlier output"),
    "position_ids": Argument("supported", "only 0, 1, 2, ... of the unmasked tokens"),
    "negative_prompt_ids": _host("with guidance_scale"), "negative_prompt_attention_mask": _host("with guidance_scale"),
    "generator": _yes("beyond HF: a torch.Generator for sampling"), "use_model_defaults": _yes("HF's own preparation"),
    "synced_gpus": _no("leave it out", False), "custom_generate": _no(_HF),
    "trust_remote_code": _no("it belongs to custom_generate; leave it out"),
    "assistant_tokenizer": _no("drafts share the target's tokenizer; leave it out"),
    "inputs_embeds": _no(f"drafts need token ids; pass input_ids, or {_HF}"),
    "token_type_ids": _no("decoder-only models take none; leave it out"),
}

_PREPARED_BY_HF = ("use_cache", "logits_to_keep")


def refuse_unsupported(generation_config, model_kwargs):
    """Raise NotImplementedError naming the first argument that would otherwise be ignored."""
    for name, argument in CONFIG.items():
        value = getattr(generation_config, name, None)
        if argument.neutral and not any(value is n or (type(value) is type(n) and value == n) for n in argument.neutral):
            note = argument.note if argument.kind == "refused" else 'only "dflash" is supported'
            raise NotImplementedError(f"{name}: {value!r} is not supported; {note}.")
    for name, value in model_kwargs.items():
        known = CALL.get(name)
        if value is None or name in _PREPARED_BY_HF or (known is not None and known.kind != "refused"):
            continue
        raise NotImplementedError(f"{name}: not supported; {known.note if known else f'leave it out, or {_HF}'}.")
    _refuse_own_positions(model_kwargs)


def refuse_call(kwargs):
    """Raise NotImplementedError for arguments of generate() that never reach HF's preparation."""
    for name in ("custom_generate", "synced_gpus", "trust_remote_code", "assistant_tokenizer", "inputs_embeds"):
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise NotImplementedError(f"{name}: not supported; {CALL[name].note}.")
    for name in ("cache", "past_key_values"):
        cache = kwargs.get(name)
        if cache is not None and not isinstance(cache, GenerationCache):
            raise NotImplementedError(f"{name}: {type(cache).__name__} is not supported; pass the cache of an earlier output of "
                                      f"this model (return_dict_in_generate=True), or leave it out.")


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


def support_summary():
    """The README's table, as Markdown lines: every argument by how it is served."""
    lines = ["| served | arguments of `GenerationConfig` and `generate()` |", "| --- | --- |"]
    for kind in ("supported", "host path", "refused"):
        names = sorted(name for name, argument in {**CONFIG, **CALL}.items() if argument.kind == kind)
        lines.append(f"| {kind} | {', '.join(f'`{name}`' for name in names)} |")
    return lines


def support_table():
    """The full table of docs/arguments.md, with notes, as Markdown lines."""
    lines = ["| argument | served | note |", "| --- | --- | --- |"]
    for name, argument in sorted({**CONFIG, **CALL}.items(), key=lambda item: (item[1].kind != "supported", item[1].kind, item[0])):
        lines.append(f"| `{name}` | {argument.kind} | {argument.note} |")
    return lines
