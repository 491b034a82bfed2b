"""Law: on real weights the output equals HF's token for token, loaded either way."""

import pytest
import torch

from dflash_torchax import disable, enable, enabled, last_stats, load_target
from dflash_torchax.embedded import embedded_target_folder

from .smollm2 import chat_ids, needs_embedded, prompts

pytestmark = needs_embedded


@pytest.mark.parametrize("count", [2, pytest.param(40, marks=pytest.mark.slow)])
def test_equals_hf(smollm2, count):
    model, draft, tokenizer = smollm2
    ids = [chat_ids(tokenizer, prompt) for prompt in prompts(count)]
    expected = [model.generate(i, max_new_tokens=64, do_sample=False) for i in ids]
    with enabled(model, draft, max_length=1000):
        for i, reference in zip(ids, expected, strict=True):
            assert torch.equal(model.generate(i, max_new_tokens=64, do_sample=False), reference)
            assert last_stats(model).acceptance_length > 1


def test_load_target_streams_into_jax(smollm2):
    model, draft, tokenizer = smollm2
    ids = chat_ids(tokenizer, prompts(1)[0])
    streamed = load_target(embedded_target_folder())
    assert all(p.device.type == "meta" for p in streamed.parameters())
    enable(streamed, draft)
    expected = model.generate(ids, max_new_tokens=24, do_sample=False)
    assert torch.equal(streamed.generate(ids, max_new_tokens=24, do_sample=False), expected)
    disable(streamed)
