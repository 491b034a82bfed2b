"""Laws of the paged cache: pages belong to one row at most, all come back, and reading them is reading static slots."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from dflash_torchax import enabled, last_stats
from dflash_torchax.cache import StaticKV
from dflash_torchax.cache_factory import PagedCache, cache_for, kernel_refusal
from dflash_torchax.paged import PagedKV
from dflash_torchax.target import Target

from .tiny import random_draft, random_prompts, scripts, tiny_target

LAYOUT = (((2, 8), (2, 8), jnp.float32),)


def _paged(batch_size=3, pages_per_row=6, page_size=4, num_pages=20):
    return PagedKV.create(LAYOUT, batch_size, pages_per_row, page_size, num_pages)


def _check_pages(cache):
    """Every page but 0 is on the stack or in one row's table, once."""
    table, held, free, height = (np.asarray(x) for x in (cache.table, cache.held, cache.free, cache.num_free))
    taken = [int(page) for row, count in zip(table, held, strict=True) for page in row[:count]]
    assert all((row[count:] == 0).all() for row, count in zip(table, held, strict=True))
    assert sorted(taken + free[: height[0]].tolist()) == list(range(1, len(free)))


def test_pages_are_never_shared_and_all_freed_over_500_random_sequences():
    """Rows grow by random amounts, are cut back and end at random, in jitted calls as the decode loop makes them."""
    reserve, release, trim = (jax.jit(f) for f in (PagedKV.reserve, PagedKV.release, PagedKV.trim))
    generator = np.random.default_rng(0)
    fresh = _paged()
    for _ in range(500):
        cache, ends = fresh, np.zeros(3, np.int32)
        for _ in range(generator.integers(1, 8)):
            event = generator.random()
            if event < 0.6:
                ends = np.minimum(ends + generator.integers(0, 9, 3), 24).astype(np.int32)
                cache = reserve(cache, ends)
                assert (np.asarray(cache.held) * 4 >= ends).all()
            elif event < 0.8:
                ends = np.minimum(ends, generator.integers(0, 25, 3)).astype(np.int32)
                cache = trim(cache, ends)
                assert (np.asarray(cache.held) == -(-ends // 4)).all()
            else:
                rows = generator.random(3) < 0.5
                cache, ends = release(cache, rows), np.where(rows, 0, ends).astype(np.int32)
            _check_pages(cache)
        cache = release(cache, np.ones(3, bool))
        assert int(cache.num_free[0]) == 19
        _check_pages(cache)


def test_a_dry_pool_shares_no_page():
    cache = _paged(num_pages=4).reserve(jnp.array([24, 24, 24], jnp.int32))
    table = np.asarray(cache.table)
    assert sorted(table[table > 0].tolist()) == [1, 2, 3]


@pytest.mark.parametrize(("batch_size", "width"), [(3, 1), (3, 7), (1, 8), (1, 1), (2, 24)])
def test_paged_attention_equals_static(batch_size, width):
    """Random writes at random starts: one by one (few pages) and at once (many)."""
    generator = np.random.default_rng(width)
    paged = _paged(batch_size).reserve(jnp.full(batch_size, 24, jnp.int32))
    static = StaticKV.create(LAYOUT, batch_size, 24)
    normal = lambda heads: jnp.asarray(generator.normal(size=(batch_size, heads, width, 8)), jnp.float32)
    for _ in range(6):
        starts = jnp.asarray(generator.integers(0, 24 - width + 1, batch_size), jnp.int32)
        positions = starts[:, None] + jnp.arange(width, dtype=jnp.int32)
        inputs = (0, normal(4), normal(2), normal(2), starts, positions, None)
        (out, paged), (expected, static) = (
            paged.attend(*inputs, scaling=0.3, window=9),
            static.attend(*inputs, scaling=0.3, window=9),
        )
        np.testing.assert_array_equal(out, expected)
        for ours, theirs in zip(paged.read(0), static.read(0), strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_gathered_attention_equals_jax_reference():
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention

    generator = np.random.default_rng(0)
    cache = _paged().reserve(jnp.array([24, 24, 24], jnp.int32))
    normal = lambda heads, width: jnp.asarray(generator.normal(size=(3, heads, width, 8)), jnp.float32)
    zeros = jnp.zeros(3, jnp.int32)
    cache = cache.write(0, normal(2, 20), normal(2, 20), zeros)
    starts = jnp.array([4, 0, 11], jnp.int32)
    query = normal(4, 5)
    out, cache = cache.attend(
        0, query, normal(2, 5), normal(2, 5), starts, starts[:, None] + jnp.arange(5), None, scaling=0.4, softcap=3.0
    )
    reference = ref_ragged_paged_attention(
        query.transpose(0, 2, 1, 3).reshape(15, 4, 8),
        cache.pages[0],
        starts + 5,
        cache.table,
        jnp.arange(4, dtype=jnp.int32) * 5,
        jnp.array([3], jnp.int32),
        sm_scale=0.4,
        soft_cap=3.0,
    )
    np.testing.assert_allclose(out.reshape(15, 4, 8), reference, atol=2e-6)


def test_grown_cache_keeps_history_and_pages():
    cache = _paged(batch_size=2, pages_per_row=2, num_pages=5).reserve(jnp.array([8, 3], jnp.int32))
    cache = cache.write(0, *(jnp.arange(2 * 2 * 8 * 8, dtype=jnp.float32).reshape(2, 2, 8, 8),) * 2, jnp.zeros(2, jnp.int32))
    grown = cache.grow(20).reserve(jnp.array([20, 20], jnp.int32))
    _check_pages(grown)
    assert grown.table.shape == (2, 5)
    np.testing.assert_array_equal(grown.read(0)[0][0, :, :8], cache.read(0)[0][0])


def test_all_pages_are_free_after_generate_and_a_finished_row_has_none():
    from dflash_torchax.engine import Engine, Request

    model = tiny_target()
    prompts = random_prompts((9, 4, 13))
    script = scripts(model, prompts, 20)
    engine = Engine(model, random_draft(model), cache=PagedCache(page_size=4))
    prompt = np.zeros((3, 13), np.int32)
    for row, ids in enumerate(prompts):
        prompt[row, : len(ids)] = ids
    lengths = np.array([9, 4, 13], np.int32)
    request = Request(prompt, lengths, lengths + np.array([20, 3, 11], np.int32), ())
    state = engine.start(request)
    freed_early = False
    while not np.asarray(state.finished).all():
        _check_pages(state.target_cache)
        finished = np.asarray(state.finished)
        held = np.asarray(state.target_cache.held)
        assert (held[finished] == 0).all()
        freed_early |= bool(finished.any() and held.any())
        state, _ = engine.stream_step(engine.params, state)
    assert freed_early
    assert int(state.target_cache.num_free[0]) == len(state.target_cache.free) - 1
    np.testing.assert_array_equal(np.asarray(state.tokens)[0, : lengths[0] + 20], script[0, : lengths[0] + 20])


def test_pool_exactly_large_enough_works_and_one_page_less_is_refused():
    model = tiny_target()
    ids = torch.tensor(random_prompts((9,)))
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)
    with enabled(model, random_draft(model), cache=PagedCache(page_size=4, num_pages=7)):  # 21 tokens: 6 pages and page 0
        assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), expected)
        stats = last_stats(model)
        with pytest.raises(ValueError, match=r"num_pages: rows of up to \[25\] tokens can need 7 pages.*num_pages=8 or more"):
            model.generate(ids, max_new_tokens=16, do_sample=False)
        assert last_stats(model) is stats  # refused before anything ran


def test_second_turn_on_a_grown_cache_equals_a_fresh_one():
    model = tiny_target()
    ids = torch.tensor(random_prompts((9,)))
    with enabled(model, random_draft(model), cache=PagedCache(page_size=4)):
        first = model.generate(ids, max_new_tokens=12, do_sample=False, return_dict_in_generate=True)
        longer = torch.cat([first.sequences, torch.tensor(random_prompts((250,), seed=3))], dim=1)
        options = {"attention_mask": torch.ones_like(longer), "max_new_tokens": 12, "do_sample": False}
        again = model.generate(longer, cache=first.cache, **options)
        assert torch.equal(again, model.generate(longer, **options))


@pytest.mark.parametrize("options", [{"page_size": 0}, {"page_size": 1.5}, {"num_pages": 1}])
def test_bad_sizes_are_refused_by_name(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        PagedCache(**options)


def test_unknown_cache_is_refused_by_name():
    with pytest.raises(ValueError, match="cache: 'page'; use 'auto', 'paged', 'static'"):
        cache_for("page", Target(tiny_target(), "cpu"))


def test_auto_is_static_off_tpu_and_paged_on_tpu_where_the_kernel_fits():
    model = tiny_target("qwen3", head_dim=128)
    assert not isinstance(cache_for("auto", Target(model, "cpu")), PagedCache)
    assert isinstance(cache_for("auto", Target(model, "tpu")), PagedCache)
    small = Target(tiny_target(), "tpu")
    assert not isinstance(cache_for("auto", small), PagedCache)
    assert "head_dim 8" in kernel_refusal(small.layout)
