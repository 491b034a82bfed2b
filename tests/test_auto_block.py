"""Laws: block_size="auto" never changes the output, drops a useless draft and takes the width that pays."""

import numpy as np
import pytest
import torch

from dflash_torchax import enable, enabled, last_stats, stream_blocks
from dflash_torchax.auto_block import BlockChooser, Report

from .tiny import left_padded, random_draft, random_prompts, tiny_target

PROMPTS = random_prompts((9, 4, 13))


@pytest.fixture(scope="module")
def model():
    return tiny_target()


@pytest.fixture(scope="module")
def auto(model):
    return enable(tiny_target(), random_draft(model), block_size="auto")


@pytest.mark.parametrize("rows", [1, 3])
def test_output_is_the_same(model, auto, rows):
    ids, mask = left_padded(PROMPTS[:rows])
    options = {"attention_mask": mask, "max_new_tokens": 120, "pad_token_id": 0}
    expected = model.generate(ids, do_sample=False, **options)
    eos = int(expected[0, ids.shape[1] + 40])
    for extra in ({}, {}, {"eos_token_id": eos}):
        assert torch.equal(auto.generate(ids, do_sample=False, **options, **extra),
                           model.generate(ids, do_sample=False, **options, **extra))
    new = [b for b, _ in stream_blocks(auto, ids, do_sample=False, **options)]
    assert sum((block[0] for block in new), []) == expected[0, ids.shape[1] :].tolist()
    with enabled(tiny_target(), None) as plain:
        torch.manual_seed(4)
        sampled = plain.generate(ids, do_sample=True, **options)
    torch.manual_seed(4)
    assert torch.equal(auto.generate(ids, do_sample=True, **options), sampled)


COSTS = {1: 1.0, 2: 1.3, 4: 1.4, 8: 1.6}


def test_a_useless_draft_is_dropped(model, monkeypatch):
    """The random draft is nearly always wrong: most tokens come from steps that drafted nothing. Costs are fixed here, so
    that the machine's mood decides nothing."""
    record = BlockChooser.record
    monkeypatch.setattr(BlockChooser, "record", lambda self, width, seconds, report: record(
        self, width, COSTS[width] * int(report.iterations), report))
    auto = enable(tiny_target(), random_draft(model), block_size="auto")
    ids = torch.tensor(PROMPTS[:1])
    auto.generate(ids, max_new_tokens=200, do_sample=False)  # measures
    auto.generate(ids, max_new_tokens=200, do_sample=False)
    stats = last_stats(auto)
    assert stats.num_drafted_tokens < stats.num_steps


def feed(chooser, costs, accept, rounds=60):
    """Drive a chooser with made-up step costs and an acceptance rate per draft; the last choice."""
    for _ in range(rounds):
        width, steps = chooser.next()
        tally = np.array([steps * accept ** (k + 1) if k < width - 1 else 0 for k in range(chooser.widths[-1] - 1)])
        chooser.record(width, costs[width] * steps, Report(steps, steps, tally, False))
    return max(chooser.widths, key=chooser.rate)


def test_chooser():
    costs = COSTS
    assert feed(BlockChooser(costs), costs, accept=0.0) == 1
    assert feed(BlockChooser(costs), costs, accept=0.9) == 8
    assert feed(BlockChooser(costs), costs, accept=0.55) == 4
    assert feed(BlockChooser(costs), {1: 1.0, 2: 2.5, 4: 3, 8: 5}, accept=0.7) == 1


def test_chooser_comes_back_when_the_draft_gets_better():
    costs = COSTS
    chooser = BlockChooser(costs)
    assert feed(chooser, costs, accept=0.0) == 1
    assert feed(chooser, costs, accept=0.9, rounds=120) == 8


def test_auto_needs_a_draft(model):
    with pytest.raises(ValueError, match="block_size: 'auto'"):
        enable(model, block_size="auto")
    assert "generate" not in model.__dict__
