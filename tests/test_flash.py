"""The flash kernel that a draft's attention runs on TPU, interpreted here, against `attention.attend`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from dflash_torchax import flash
from dflash_torchax.attention import attend

BATCH, HEADS, KV_HEADS, WIDTH, SLOTS, HEAD_DIM = 3, 6, 2, 5, 256, 128


def _arrays(dtype):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((BATCH, HEADS, WIDTH, HEAD_DIM), *[(BATCH, KV_HEADS, SLOTS, HEAD_DIM)] * 2)
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


@pytest.mark.parametrize(("dtype", "atol"), [(jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)])
def test_it_equals_the_plain_attention_on_rows_of_unequal_length(dtype, atol):
    query, key, value = _arrays(dtype)
    last = jnp.array([0, 130, SLOTS - 1], jnp.int32)
    positions = last[:, None] + jnp.arange(WIDTH, dtype=jnp.int32)
    ours = attend(query, key, value, positions, last, scaling=0.1, symmetric=True)
    with pltpu.force_tpu_interpret_mode():
        kernel = flash.attend_to_row(query, key, value, last, scaling=0.1)
    assert (kernel.shape, kernel.dtype) == (ours.shape, ours.dtype)
    np.testing.assert_allclose(kernel.astype(jnp.float32), ours.astype(jnp.float32), atol=atol)
    # The first row sees one slot only: its value, whatever the query.
    np.testing.assert_allclose(kernel[0, 0, 0].astype(jnp.float32), value[0, 0, 0].astype(jnp.float32), atol=atol)


def test_it_is_taken_only_where_it_computes_the_same():
    _, key, value = _arrays(jnp.float32)
    assert flash.fits("tpu", key, value, scaling=0.1, symmetric=True)
    assert not flash.fits("cpu", key, value)
    assert not flash.fits("tpu", key, value, window=8)
    assert not flash.fits("tpu", key, value, softcap=30.0)
    assert not flash.fits("tpu", key, value, sinks=jnp.zeros(HEADS))
    assert not flash.fits("tpu", key[:, :, :100], value[:, :, :100])
    assert not flash.fits("tpu", key[..., :64], value[..., :64])
