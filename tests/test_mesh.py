"""Law: any mesh generates the tokens of one device. Runs in processes of their own, with four virtual CPU devices."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

SAME_TOKENS = """
import math
import jax
import torch
from dflash_torchax import enabled, last_stats
from dflash_torchax import PagedCache
from tests.tiny import left_padded, random_draft, random_prompts, tiny_target

model = tiny_target({architecture!r}, vocab_size=96, num_hidden_layers=2)
draft = random_draft(model, block_size=8, vocab_size=96, taps=(0, 1), layers=1)
ids, mask = left_padded([[t % 96 for t in p] for p in random_prompts((9, 4, 13))])
options = dict(attention_mask=mask, max_new_tokens=16, do_sample=False)
expected = model.generate(ids, **options)
accepted = None
for cache, shape, names in {cases}:
    mesh = jax.make_mesh(shape, names, devices=jax.devices()[: math.prod(shape)]) if shape else None
    with enabled(model, draft, cache=cache, mesh=mesh):
        assert torch.equal(model.generate(ids, **options), expected), (cache, shape)
        stats = last_stats(model)
    accepted = accepted or stats.accepted_per_step
    assert stats.accepted_per_step == accepted, (cache, shape)
print("same")
"""

SHARDED_FROM_THE_FILE = """
import tempfile
import jax
import torch
from jax.sharding import PartitionSpec as P
from dflash_torchax import enabled, load_target
from tests.tiny import random_draft, random_prompts, tiny_target

model = tiny_target("llama", vocab_size=96)
ids = torch.tensor([[t % 96 for t in p] for p in random_prompts((9,))])
expected = model.generate(ids, max_new_tokens=8, do_sample=False)
folder = tempfile.mkdtemp()
model.save_pretrained(folder)
mesh = jax.make_mesh((2, 2), ("data", "tp"))
loaded = load_target(folder, mesh=mesh)
few_words = random_draft(model, vocab_size=96)
few_words.vocabulary = torch.arange(10, 58)
with enabled(loaded, few_words, mesh=mesh):
    engine = loaded.generate.engine
    assert torch.equal(loaded.generate(ids, max_new_tokens=8, do_sample=False), expected)
    # One row on two data shards: a cache is reused although its batch was filled up.
    options = dict(max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    first = loaded.generate(ids, **options)
    longer = torch.cat([first.sequences, torch.tensor([[11, 12, 13]])], dim=1)
    again = loaded.generate(longer, cache=first.cache, **options)
    assert torch.equal(again.sequences, loaded.generate(longer, **options).sequences)
    assert again.stats.num_prefill_tokens < longer.shape[1] / 2
assert not hasattr(engine.decoder.target.skeleton, "_dflash_torchax_params")
specs = lambda name, params: params[name].sharding.spec
target, (draft, head) = engine.params.target, engine.params.draft
model_axes = ("tp",)
for name, params, spec in (
    ("model.embed_tokens.weight", target, P(model_axes, None)), ("lm_head.weight", target, P(model_axes, None)),
    ("model.layers.1.self_attn.k_proj.weight", target, P(model_axes, None)),
    ("model.layers.1.self_attn.o_proj.weight", target, P(None, model_axes)),
    ("model.layers.1.mlp.down_proj.weight", target, P(None, model_axes)),
    ("model.norm.weight", target, P(None)),
    ("layers.0.self_attn.q_proj.weight", draft, P(model_axes, None)), ("fc.weight", draft, P(None, model_axes)),
    ("lm_head.weight", head, P(model_axes, None)),
):
    assert specs(name, params) == spec, (name, specs(name, params))
print("same")
"""


def run_with_devices(code, devices=4, **variables):
    """Run `code` on virtual CPU devices; its asserts are the test's."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": str(ROOT),
        **variables,
    }
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "same" in done.stdout
    return done.stderr


# (cache, mesh shape, axis names); no shape is one device without a mesh.
ONE_TWO_FOUR = """(
    ("static", (), ()), ("static", (2,), ("model",)), ("static", (2, 2), ("data", "model")),
    (PagedCache(page_size=4), (4,), ("data",)), (PagedCache(page_size=4), (2, 2), ("data", "model")),
)"""


def test_1_2_and_4_devices_and_data_by_tensor_give_the_same_tokens():
    """Three rows on two and four data shards also show that rows are filled up."""
    run_with_devices(SAME_TOKENS.format(architecture="llama", cases=ONE_TWO_FOUR))


def test_uneven_heads_are_replicated_and_named():
    """Two kv heads on four devices: attention is replicated, the rest is split, the tokens are the same."""
    log = run_with_devices(SAME_TOKENS.format(architecture="llama", cases=[("static", (4,), ("model",))]))
    assert (
        "model.layers.*.self_attn.k_proj.weight: shape (16, 32) with 2 kv heads does not divide over 4 devices; it is replicated"
        in log
    )


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["mistral", "qwen3", "phi3", "gpt_neox"])
def test_other_architectures_give_the_same_tokens(architecture):
    run_with_devices(SAME_TOKENS.format(architecture=architecture, cases=ONE_TWO_FOUR))


def test_weights_are_placed_sharded_from_the_file_on():
    run_with_devices(SHARDED_FROM_THE_FILE)


def test_a_mesh_of_another_type_is_refused_by_name():
    from dflash_torchax import enable

    from .tiny import tiny_target

    with pytest.raises(TypeError, match="mesh: expected a jax.sharding.Mesh, got tuple"):
        enable(tiny_target(), mesh=(2, 2))
