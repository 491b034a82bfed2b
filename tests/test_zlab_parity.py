"""Law: the draft computes what z-lab's does, and accepts what z-lab's loop accepts (PyPI `dflash` 0.1.0)."""

import json
from pathlib import Path

import jax
import pytest
import torch
from transformers import Qwen3Config

from dflash_torchax import enabled, last_stats, load_draft
from dflash_torchax.config import DFlashConfig
from dflash_torchax.draft_model import DFlashDraftModel
from dflash_torchax.embedded import DRAFT_FOLDER
from dflash_torchax.engine import Engine

from .smollm2 import chat_ids, needs_embedded, prompts
from .test_lowering import request_of
from .tiny import random_prompts, tiny_target

zlab = pytest.importorskip("dflash.model", reason="PyPI dflash is not installed")


def zlab_twin(draft, fields):
    """z-lab's module with the weights of ours."""
    twin = zlab.DFlashDraftModel(Qwen3Config(**{**fields, "attn_implementation": "sdpa"}))
    missing, unexpected = twin.load_state_dict(draft.state_dict(), strict=False)
    assert not unexpected
    assert all("rotary" in name for name in missing)
    return twin.float().eval()


def zlab_accepts(twin, target, ids, new_tokens, eos, monkeypatch):
    """(output ids, accepted draft tokens of each step) of z-lab's loop."""
    monkeypatch.setattr(zlab, "_cuda_time", lambda: 0.0)
    result = zlab.dflash_generate(twin, target, ids, new_tokens, eos, return_stats=True)
    return result.output_ids, [n - 1 for n in result.acceptance_lengths]


FIELDS = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "vocab_size": 97, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 512, "block_size": 8,
    "num_target_layers": 4, "dflash_config": {"mask_token_id": 5, "target_layer_ids": [0, 2]},
}
VARIANTS = {
    "full": {},
    "sliding": {"use_sliding_window": True, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "symmetric": {"use_sliding_window": True, "sliding_window": 6, "layer_types": ["sliding_attention"] * 2, "is_causal": False},
    "causal": {"is_causal": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_tiny_pair(variant, monkeypatch):
    fields = {**FIELDS, **VARIANTS[variant]}
    target = tiny_target(vocab_size=12)  # so few words that a random draft is right now and then
    torch.manual_seed(1)
    draft = DFlashDraftModel(DFlashConfig.from_dict(fields)).eval()
    twin = zlab_twin(draft, fields)
    accepted = 0
    for prompt in random_prompts((9, 1, 30, 12, 21), seed=5):
        ids = torch.tensor([prompt]) % 11 + 1
        expected, steps = zlab_accepts(twin, target, ids, 60, None, monkeypatch)
        with enabled(target, draft):
            assert torch.equal(target.generate(ids, max_new_tokens=60, do_sample=False), expected)
            assert last_stats(target).accepted_per_step == [steps]
        accepted += sum(steps)
    assert accepted > 0, "a pair that never accepts would hide a wrong context"


def test_draft_hidden_states():
    target = tiny_target()
    draft = DFlashDraftModel(DFlashConfig.from_dict(FIELDS)).eval()
    engine = Engine(target, draft)
    request = request_of((11,))
    _compare_hidden(engine, target, draft, FIELDS, request)


def _compare_hidden(engine, target, draft, fields, request):
    state = engine.start(request)
    ours, _ = jax.jit(engine.decoder.proposer.denoise)(engine.params.draft, engine.params.target, state)
    length = int(request.lengths[0])
    ids = torch.tensor(request.prompt[:, :length]).long()
    with torch.no_grad():
        output = target(ids, output_hidden_states=True)
        anchor = output.logits[:, -1:].argmax(-1)
        context = zlab.extract_context_feature(output.hidden_states, draft.config.target_layer_ids)
        block = torch.cat([anchor, torch.full((1, draft.config.block_size - 1), draft.config.mask_token_id)], dim=1)
        noise = torch.nn.functional.embedding(block, target.get_input_embeddings().weight)
        positions = torch.arange(length + block.shape[1]).unsqueeze(0)
        theirs = zlab_twin(draft, fields)(target_hidden=context, noise_embedding=noise, position_ids=positions)
    torch.testing.assert_close(torch.from_dlpack(ours), theirs, atol=1e-4, rtol=1e-4)


@needs_embedded
def test_embedded_pair_hidden_states(smollm2):
    target, draft, tokenizer = smollm2
    fields = json.loads(Path(DRAFT_FOLDER, "config.json").read_text())
    draft = load_draft(DRAFT_FOLDER, dtype=torch.float32)
    _compare_hidden(Engine(target, draft), target, draft, fields, request_of((11,)))


@needs_embedded
@pytest.mark.parametrize("count", [2, pytest.param(30, marks=pytest.mark.slow)])
def test_embedded_pair_accepts_as_zlab(smollm2, count, monkeypatch):
    target, _, tokenizer = smollm2
    draft = load_draft(DRAFT_FOLDER, dtype=torch.float32)
    draft.vocabulary = None  # z-lab's loop knows of none: it guesses among all ids
    twin = zlab_twin(draft, json.loads(Path(DRAFT_FOLDER, "config.json").read_text()))
    for prompt in prompts(count):
        ids = chat_ids(tokenizer, prompt)
        expected, steps = zlab_accepts(twin, target, ids, 64, [2], monkeypatch)
        with enabled(target, draft, max_length=1000):
            assert torch.equal(target.generate(ids, max_new_tokens=64, do_sample=False), expected)
            assert last_stats(target).accepted_per_step == [steps]
