"""Law: bad input is an error that names argument or field, its value and the way out, and nothing is half done."""

import json
import pickle

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from dflash_torchax import disable, enable, last_stats, load_draft, load_target
from dflash_torchax.config import DFlashConfig

from .tiny import random_draft, tiny_target


@pytest.fixture(scope="module")
def model():
    return tiny_target()


@pytest.fixture
def checkpoint(model, tmp_path):
    """Folder of a draft that fits `model`, and a function that rewrites its config or tensors."""
    save_file(random_draft(model).state_dict(), tmp_path / "model.safetensors")
    fields = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "vocab_size": 97, "num_target_layers": 4, "block_size": 8, "model_type": "qwen3",
        "dflash_config": {"mask_token_id": 5, "target_layer_ids": [0, 2]},
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))

    def rewrite(tensors=None, nested=None, **changes):
        changed = {**fields, **changes, "dflash_config": {**fields["dflash_config"], **(nested or {})}}
        changed = {k: v for k, v in changed.items() if v is not None}
        changed["dflash_config"] = {k: v for k, v in changed["dflash_config"].items() if v is not None}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        if tensors:
            save_file(tensors(load_file(tmp_path / "model.safetensors")), tmp_path / "model.safetensors")
        return tmp_path

    return rewrite


def refused(model, call, *words, error=ValueError):
    """`call` raises one paragraph containing all words, and the model still has HF's own generate."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert all(str(word) in message for word in words), message
    assert "generate" not in model.__dict__


def test_the_checkpoint_of_these_tests_loads(model, checkpoint):
    enable(model, load_draft(checkpoint()))
    disable(model)


@pytest.mark.parametrize(("changes", "words"), [
    ({"nested": {"target_layer_ids": [0, -2]}}, ("target_layer_ids", -2)),
    ({"nested": {"target_layer_ids": [0, 4]}}, ("target_layer_ids", 4, "0..3")),
    ({"nested": {"target_layer_ids": []}}, ("target_layer_ids", "[]")),
    ({"nested": {"target_layer_ids": None}, "num_target_layers": None}, ("target_layer_ids", "num_target_layers")),
    ({"nested": {"mask_token_id": 97}}, ("mask_token_id", 97)),
    ({"nested": {"mask_token_id": -1}}, ("mask_token_id", -1)),
    ({"nested": {"mask_token_id": None}}, ("mask_token_id", "missing")),
    ({"block_size": 0}, ("block_size", 0)),
    ({"num_target_layers": 5}, ("num_target_layers", 5, 4)),
    ({"nested": {"target_layer_ids": [0, 1, 2]}}, ("fc.weight", "(32, 64)", "(32, 96)")),
    ({"hidden_size": 64}, ("weight", "config")),
    ({"tensors": lambda t: {k: v for k, v in t.items() if k != "norm.weight"}}, ("norm.weight", "missing")),
    ({"tensors": lambda t: {**t, "lm_head.weight": torch.zeros(2)}}, ("lm_head.weight", "unexpected")),
    ({"tensors": lambda t: {**t, "norm.weight": torch.full_like(t["norm.weight"], torch.nan)}}, ("norm.weight", "NaN")),
    ({"tensors": lambda t: {**t, "norm.weight": torch.full_like(t["norm.weight"], torch.inf)}}, ("norm.weight", "infinity")),
    ({"tensors": lambda t: {**t, "norm.weight": torch.zeros(7)}}, ("norm.weight", "(7,)", "(32,)")),
])
def test_bad_drafts(model, checkpoint, changes, words):
    refused(model, lambda: enable(model, load_draft(checkpoint(**changes))), *words)


def test_other_dialects_are_refused(model, checkpoint):
    refused(model, lambda: load_draft(checkpoint(speculators_model_type="dflash")), "speculators", error=NotImplementedError)
    refused(model, lambda: load_draft(checkpoint(nested={"selector_rank": 4})), "DFlash2", error=NotImplementedError)


def test_taps_are_derived_only_when_they_can_be():
    base = {"dflash_config": {"mask_token_id": 5}, "num_hidden_layers": 5, "num_target_layers": 36}
    assert DFlashConfig.from_dict(base).target_layer_ids == (1, 9, 17, 25, 33)
    assert DFlashConfig.from_dict({**base, "num_hidden_layers": 1}).target_layer_ids == (18,)


def test_draft_of_another_width(model):
    draft = random_draft(tiny_target(hidden_size=64))
    refused(model, lambda: enable(model, draft), "hidden_size", 64, 32)


@pytest.mark.parametrize("block_size", [0, -3, 9, 2.5, True])
def test_block_size(model, block_size):
    refused(model, lambda: enable(model, random_draft(model, block_size=8), block_size=block_size), "block_size", block_size)


def test_other_arguments_of_enable(model):
    refused(model, lambda: enable(model, block_size=4), "block_size", "draft")
    refused(model, lambda: enable(model, object()), "draft", "load_draft", error=TypeError)
    refused(model, lambda: enable(model, max_length=513), "max_length", 512)
    refused(model, lambda: enable(model, max_length=0), "max_length", 0)
    refused(model, lambda: last_stats(model), "enable")


@pytest.mark.parametrize(("config", "words"), [
    (transformers.T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2, vocab_size=32), ("encoder-decoder",)),
    (transformers.MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=32), ("recurrent",)),
    (transformers.BloomConfig(hidden_size=16, n_layer=1, n_head=2, vocab_size=32), ("AttentionInterface",)),
    (transformers.LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32,
                              rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}), ("dynamic",)),
])
def test_targets_without_a_position_addressed_cache(config, words):
    auto = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    other = auto.from_config(config)
    refused(other, lambda: enable(other), *words, "generate", error=NotImplementedError)


def test_not_a_model():
    with pytest.raises(TypeError, match="model"):
        enable(torch.nn.Linear(2, 2))


class TestGenerate:
    """Bad arguments of generate on an enabled model."""

    @pytest.fixture(scope="class")
    def enabled(self):
        model = tiny_target(max_position_embeddings=64)
        yield enable(model, random_draft(model))
        disable(model)

    @pytest.mark.parametrize(("ids", "kwargs", "words"), [
        (torch.zeros(1, 0, dtype=torch.long), {}, ("input_ids",)),
        (torch.ones(1, 60, dtype=torch.long), {"max_new_tokens": 10}, ("max_new_tokens", 60, 64)),
        (torch.ones(1, 4, dtype=torch.long), {"attention_mask": torch.tensor([[1, 0, 1, 1]])}, ("attention_mask", "left")),
        (torch.ones(1, 4, dtype=torch.long), {"attention_mask": torch.tensor([[1, 1, 1, 0]])}, ("attention_mask", "padding_side")),
        (torch.ones(2, 4, dtype=torch.long), {"attention_mask": torch.tensor([[1] * 4, [0] * 4])}, ("input_ids", "empty")),
        (torch.ones(4, dtype=torch.long), {"max_new_tokens": 3}, ("input_ids", "1-D")),
        (torch.full((1, 4), 97), {}, ("input_ids", 97)),
        (torch.full((1, 4), -1), {}, ("input_ids", -1)),
        (torch.ones(1, 4), {}, ("inputs", "float32", "torch.long")),
        ([[7, 8]], {}, ("input_ids", "list")),
        (torch.zeros(0, 3, dtype=torch.long), {}, ("inputs", "empty batch")),
        (torch.ones(1, 4, dtype=torch.long), {"attention_mask": [[1, 1, 1, 1]]}, ("attention_mask", "list")),
        (torch.ones(2, 4, dtype=torch.long), {"pad_token_id": 5000}, ("pad_token_id", 5000)),
        (torch.ones(1, 4, dtype=torch.long), {"do_sample": True, "generator": 3}, ("generator", 3)),
        (torch.ones(1, 4, dtype=torch.long), {"sequence_bias": {(500,): -9.0}}, ("sequence_bias", 500, 97)),
    ])
    def test_inputs(self, enabled, ids, kwargs, words):
        with pytest.raises((ValueError, IndexError)) as caught:
            enabled.generate(ids, **{"max_new_tokens": 4, "do_sample": False, **kwargs})
        assert all(str(word) in str(caught.value) for word in words), caught.value

    @pytest.mark.parametrize(("name", "value"), [
        ("num_beams", 2), ("num_return_sequences", 2), ("output_attentions", True), ("output_hidden_states", True),
        ("cache_implementation", "static"), ("prompt_lookup_num_tokens", 3), ("assistant_model", object()), ("synced_gpus", True),
        ("inputs_embeds", torch.zeros(1, 4, 32)), ("custom_generate", "some/repo"), ("low_memory", True), ("stop_strings", "x"),
        ("position_ids", torch.tensor([[3, 4, 5, 6]])), ("past_key_values", transformers.DynamicCache()),
    ])
    def test_unsupported_arguments_are_refused_by_name(self, enabled, name, value):
        before = enabled.__dict__["generate"].last_stats
        with pytest.raises((NotImplementedError, ValueError)) as caught:
            enabled.generate(torch.ones(1, 4, dtype=torch.long), **{"max_new_tokens": 4, "do_sample": False, name: value})
        names = {"past_key_values": "cache", "num_return_sequences": "num_return", "stop_strings": "stop strings"}
        assert names.get(name, name) in str(caught.value)
        assert enabled.__dict__["generate"].last_stats is before


def test_a_failed_enable_keeps_the_previous_one(model):
    enable(model, random_draft(model))
    generate = model.generate
    with pytest.raises(ValueError, match="block_size"):
        enable(model, random_draft(model), block_size=99)
    assert model.generate is generate
    disable(model)


def test_pickling_an_enabled_model_says_what_to_do(model):
    enable(model, random_draft(model))
    with pytest.raises(TypeError, match="disable"):
        pickle.dumps(model)
    disable(model)
    pickle.dumps(model)


def test_sampling_from_nothing_is_an_error_as_in_hf(model):
    options = {"do_sample": True, "max_new_tokens": 4, "suppress_tokens": list(range(97)), "pad_token_id": 0}
    enable(model, random_draft(model))
    with pytest.raises(RuntimeError, match="leave no token"):
        model.generate(torch.ones(1, 4, dtype=torch.long), **options)
    disable(model)


@pytest.mark.parametrize("load", [load_draft, load_target])
def test_loading_from_what_is_no_path(load):
    for path in (None, 3):
        with pytest.raises(TypeError, match="path_or_repo"):
            load(path)


def test_dtypes_are_spelled_as_in_hf(tmp_path, model, checkpoint):
    model.save_pretrained(tmp_path / "target")
    assert load_target(tmp_path / "target", dtype="bfloat16").dtype == torch.bfloat16
    assert load_target(tmp_path / "target", dtype="auto").dtype == torch.float32
    for dtype in ("foo", torch.int8):
        with pytest.raises(ValueError, match="dtype"):
            load_target(tmp_path / "target", dtype=dtype)
    streamed = enable(load_target(tmp_path / "target"))
    with pytest.raises(NotImplementedError, match="guidance_scale"):
        streamed.generate(torch.ones(1, 4, dtype=torch.long), max_new_tokens=3, guidance_scale=1.5)


def test_load_target_names_what_is_missing(tmp_path, model):
    with pytest.raises(FileNotFoundError, match="config.json"):
        load_target(tmp_path)
    with pytest.raises(FileNotFoundError, match="neither a folder nor a repo"):
        load_target("/nowhere/at/all")
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="safetensors"):
        load_target(tmp_path)
