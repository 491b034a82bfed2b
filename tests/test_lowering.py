"""Laws of the compiled programs: how many there are, what is aliased, what is captured, what crosses to the host."""

import contextlib
import re

import jax
import numpy as np
import pytest
import torch
from jax._src import monitoring

from dflash_torchax import disable, enable
from dflash_torchax.engine import Engine, Request, bucket

from .tiny import random_draft, random_prompts, tiny_target


@pytest.fixture(scope="module")
def model():
    return tiny_target()


@pytest.fixture(scope="module")
def engine(model):
    return Engine(model, random_draft(model))


def request_of(lengths=(9,), new_tokens=30, eos=(), seed=0):
    prompts = random_prompts(lengths, seed)
    width = max(lengths)
    prompt = np.array([p + [0] * (width - len(p)) for p in prompts], np.int32)
    lengths = np.array(lengths, np.int32)
    return Request(prompt, lengths, lengths + new_tokens, tuple(eos))


@contextlib.contextmanager
def counted_compiles():
    """A list that receives one entry for every program XLA is asked for (from its cache or not)."""
    events = []

    def listen(event, duration, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(duration)

    monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        monitoring.unregister_event_duration_listener(listen)


def test_few_programs_serve_all_prompt_lengths_and_limits(model):
    enable(model, random_draft(model))
    try:
        with counted_compiles() as compiles:
            for length in range(1, 41):
                for new_tokens in (3, 16, 50):
                    ids = torch.tensor(random_prompts((length,), seed=length))
                    model.generate(ids, max_new_tokens=new_tokens, do_sample=False)
        assert 2 <= len(compiles) <= 7
    finally:
        disable(model)


def test_eos_ids_and_limits_compile_nothing(model):
    enable(model, random_draft(model))
    try:
        ids = torch.tensor(random_prompts((9,)))
        model.generate(ids, max_new_tokens=20, do_sample=False)
        with counted_compiles() as compiles:
            for eos in (3, [4], [5, 6, 7]):
                for new_tokens in (2, 9, 33):
                    model.generate(ids, max_new_tokens=new_tokens, do_sample=False, eos_token_id=eos, pad_token_id=0)
        assert compiles == []
    finally:
        disable(model)


@pytest.mark.parametrize("program", ["decode_loop", "stream_step"])
def test_state_is_aliased_and_no_weight_is_a_constant(engine, program):
    state = engine.start(request_of())
    lowered = getattr(engine, program).lower(engine.params, state)
    compiled = lowered.compile().as_text()
    aliased = {int(n) for n in re.findall(r"\((\d+), \{\}, (?:may|must)-alias\)", compiled.split("\n", 1)[0])}
    assert len(aliased) == len(jax.tree.leaves(state)), "every leaf of the state, both caches among them, is written in place"
    constants = re.findall(r"stablehlo\.constant dense<[^>]*> : tensor<([0-9x]+)x", lowered.as_text())
    assert all(np.prod([int(n) for n in shape.split("x")]) < 1024 for shape in constants)


def test_loop_reads_nothing_from_the_host(engine):
    state = engine.start(request_of())
    warm = engine.decode_loop(engine.params, engine.start(request_of()))
    jax.block_until_ready(warm)
    with jax.transfer_guard("disallow"):
        state = engine.decode_loop(engine.params, state)
        jax.block_until_ready(state)
    assert int(state.lengths[0]) == 39


def test_buckets_are_powers_of_two():
    assert [bucket(n, 4) for n in (0, 1, 4, 5, 8, 9, 1000)] == [4, 4, 4, 8, 8, 16, 1024]


def test_max_length_fixes_the_cache(model):
    engine = Engine(model, random_draft(model), max_length=300)
    assert engine.slots_for(request_of()) == engine.slots_for(request_of(new_tokens=200)) == 512
