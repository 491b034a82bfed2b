"""Laws of the programs compiled for TPU topologies, and of the errors on the way there.

Reduced depth in the fast set (where libtpu is installed), the published pairs under `-m tpu_compile`.
"""

import importlib.util
import math
import re
from importlib import metadata

import jax
import pytest

from dflash_torchax.aot import report as reports
from dflash_torchax.aot.pair import check_fits, compile_pair
from dflash_torchax.aot.presets import PRESETS
from dflash_torchax.aot.programs import CapacityError, Compiler, Shape, abstract_draft, abstract_target, read_config
from dflash_torchax.aot.topology import CHIPS, LIBTPU_FOR_JAX, check_libtpu, chip_of, mesh_of

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu (extra [tpu]) is not installed")
TOPOLOGIES = ("v5p:2x2x1", "v5e:2x2", "v6e:2x2")
MB = 1e6
_ITEM_BYTES = {"pred": 1, "bf16": 2, "s32": 4, "u32": 4, "f32": 4}


def _pair(preset, layers=None):
    """Target and draft on meta, at full depth or with `layers` target layers and one draft layer."""
    if layers is None:
        return abstract_target(read_config(preset, 0)), abstract_draft(read_config(preset, 1))
    taps = tuple(range(layers))
    return abstract_target(read_config(preset, 0), layers), abstract_draft(read_config(preset, 1), taps, num_layers=1)


def _largest_collective(document):
    return max((item["bytes"] for row in document["programs"] for item in row["collectives"]), default=0)


def _check_collectives(document, hidden):
    """Nothing larger than a block's float32 activations moves between chips: no weight and no cache."""
    widest = max(row["width"] for row in document["programs"])
    assert 0 < _largest_collective(document) <= document["batch"] * widest * hidden * 4


@needs_libtpu
def test_reduced_depth_step_compiles_for_one_chip_with_one_kernel_per_target_layer():
    document = compile_pair(*_pair("qwen3-4b", 2), "v5p:2x2x1", tau=6.5)
    plain, step = document["programs"]
    assert (plain["kernel_calls"], step["kernel_calls"]) == (2, 2)
    assert (plain["draft_kernel_calls"], step["draft_kernel_calls"]) == (0, 1)
    assert document["cache"] == "PagedCache"
    assert step["temporary_bytes"] < 100 * MB
    assert not step["collectives"]
    # Outputs are the donated state: the total is arguments and temporaries.
    assert step["total_bytes"] - step["argument_bytes"] - step["temporary_bytes"] < 1 * MB
    assert document["per_token"][0]["ms_per_token"] == pytest.approx(step["estimated_ms"] / 6.5)
    assert document["largest_context"] > 2048


@needs_libtpu
def test_reduced_depth_step_over_four_chips_moves_activations_only():
    document = compile_pair(*_pair("llama3.1-8b", 2), "v5e:2x2", tp=4)
    assert [row["kernel_calls"] for row in document["programs"]] == [2, 2]
    _check_collectives(document, hidden=4096)


@needs_libtpu
def test_a_pair_that_does_not_fit_is_refused_with_the_numbers_before_compiling():
    compiler = Compiler(*_pair("llama3.1-8b", 2), mesh_of("v5e:2x2"), Shape(batch=64, context=65536))
    with pytest.raises(
        CapacityError, match=r"batch 64 and context 65536 take \d+\.\d GiB on each device, but a v5e has 16 GiB. Raise tp above 1"
    ):
        check_fits(compiler, CHIPS["v5e"], "v5e:2x2", 1)


@needs_libtpu
def test_wrong_topologies_are_refused_by_name():
    with pytest.raises(ValueError, match="topology: libtpu cannot make 'v5p:9x9x9'.*v5e:2x2"):
        mesh_of("v5p:9x9x9")
    with pytest.raises(ValueError, match="tp: 8 x 1 chips asked for, but v5e:2x2 has 4"):
        mesh_of("v5e:2x2", 8)


@pytest.mark.parametrize("name", ["v9:2x2", "v5p", ""])
def test_unknown_chips_are_refused_by_name(name):
    with pytest.raises(ValueError, match="topology: .*give chip:shape"):
        chip_of(name)


def test_missing_libtpu_names_the_command(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(ImportError, match="libtpu, which holds the TPU compiler, is not installed. Run: pip install"):
        check_libtpu()


@pytest.mark.skipif(jax.__version__ not in LIBTPU_FOR_JAX, reason="this jax's libtpu is not known")
def test_libtpu_of_another_version_is_refused_with_both_versions(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: "0.0.1")
    with pytest.raises(ValueError, match=f"libtpu: version 0.0.1 is installed, but jax {jax.__version__} needs"):
        check_libtpu()


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_the_published_pairs(preset):
    """The draft fits its target: depth, width, taps and mask id."""
    target, draft = PRESETS[preset]
    taps = draft["dflash_config"]["target_layer_ids"]
    assert max(taps) < target["num_hidden_layers"] == draft["num_target_layers"]
    assert (draft["hidden_size"], draft["vocab_size"]) == (target["hidden_size"], target["vocab_size"])
    assert 0 <= draft["dflash_config"]["mask_token_id"] < target["vocab_size"]


def test_unknown_config_is_refused_by_name(tmp_path):
    with pytest.raises(FileNotFoundError, match="is no preset"):
        read_config("qwen9", 0)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert read_config(tmp_path, 0) == {"model_type": "qwen3"}


def test_collectives_are_counted_by_kind_and_size():
    text = """
  %all-reduce.1 = bf16[1,16,4096]{2,1,0:T(8,128)(2,1)} all-reduce(%fusion.2), channel_id=1
  %all-reduce.2 = bf16[1,16,4096]{2,1,0} all-reduce(%fusion.3), channel_id=2
  ROOT %ag = (f32[4]{0}, f32[16]{0}) all-gather-start(%x), channel_id=3
  %done = f32[16]{0} all-gather-done(%ag)
"""
    found = reports.collectives_of(text)
    assert [(item.kind, item.bytes, item.count) for item in found] == [("all-reduce", 131072, 2), ("all-gather", 64, 1)]


@needs_libtpu
@pytest.mark.tpu_compile
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("preset", PRESETS)
def test_published_pair_compiles_for_one_chip_or_four(preset, topology):
    """One v5e has 16 GiB: the 8B models take four of them."""
    target, draft = _pair(preset)
    tp = 4 if topology.startswith("v5e") and preset != "qwen3-4b" else 1
    document = compile_pair(target, draft, topology, tp=tp)
    assert all(row["kernel_calls"] == target.config.num_hidden_layers for row in document["programs"])
    assert all(row["fits"] for row in document["programs"])
    if tp > 1:
        _check_collectives(document, target.config.hidden_size)


@needs_libtpu
@pytest.mark.tpu_compile
@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v6e:2x2"])
@pytest.mark.parametrize("preset", ["qwen3-8b", "llama3.1-8b"])
def test_four_chips_move_no_weight_and_no_cache(preset, topology):
    target, draft = _pair(preset)
    document = compile_pair(target, draft, topology, tp=4)
    assert all(row["kernel_calls"] == target.config.num_hidden_layers for row in document["programs"])
    _check_collectives(document, target.config.hidden_size)


@needs_libtpu
@pytest.mark.tpu_compile
def test_cost_of_the_qwen3_4b_step_on_v5p():
    """DFlash step <= 1.35 plain steps, verify of 64 tokens <= 1.3 of one, temporaries < 100 MB; the compiler's estimates."""
    document = compile_pair(*_pair("qwen3-4b"), "v5p:2x2x1")
    plain, step = document["programs"]
    assert step["estimated_ms"] <= 1.35 * plain["estimated_ms"]
    assert step["temporary_bytes"] < 100 * MB
    compiler = Compiler(_pair("qwen3-4b")[0], None, mesh_of("v5p:2x2x1"), Shape(), options=reports.COUNT_BYTES_ONCE)
    one, many = (reports.report_of(compiler.verify(width), CHIPS["v5p"]).estimated_ms for width in (1, 64))
    assert many <= 1.3 * one


def _bytes_made_per_context(text, slots):
    """Bytes of the arrays with a dimension of `slots` that a program makes anew: neither its arguments nor updates in place."""
    made = 0
    for line in text[text.index("\nENTRY") :].splitlines():
        found = re.match(r"\s+(?:ROOT )?%?[\w.\-]+ = \(?(.*?)\)? (\w[\w\-]*)\(", line)
        if found and found[2] not in ("parameter", "dynamic-update-slice", "get-tuple-element", "bitcast", "tuple"):
            for dtype, dims in re.findall(r"([a-z]+\d*)\[([\d,]+)\]", found[1]):
                sizes = [int(size) for size in dims.split(",")]
                made += math.prod(sizes) * _ITEM_BYTES[dtype] if slots in sizes else 0
    return made


@needs_libtpu
@pytest.mark.tpu_compile
@pytest.mark.parametrize("cache", ["paged", "static"])
def test_bytes_per_step_grow_with_context_by_attention_reads_only(cache):
    """From 256 to 4096 tokens nothing grows but K/V reads, and on the paged cache one visibility mask of the draft.

    A static target cache is read by XLA's own attention, whose float32 scores count up to twelve times.
    """
    target, draft = _pair("qwen3-4b", 4)
    moved, per_token = {}, 0
    for context in (256, 1024, 4096):
        compiler = Compiler(target, draft, mesh_of("v5p:2x2x1"), Shape(context=context), cache, reports.COUNT_BYTES_ONCE)
        of_target, of_draft = reports.context_bytes_per_token(compiler.engine, 1)
        per_token = 1.15 * of_draft  # the mask, and what the compiler decides otherwise at another size
        if cache == "static":  # XLA does not see what the paged kernel reads
            per_token += of_target + 12 * 4 * 4 * target.config.num_attention_heads * compiler.engine.block_size
        program = compiler.dflash_step()
        moved[context] = reports.report_of(program, CHIPS["v5p"]).bytes
        if cache == "paged":  # one row of ids and their int32 [8, slots] for the kernel
            slots = compiler.slots(compiler.engine)
            assert _bytes_made_per_context(program.compiled.as_text(), slots) <= (8 + 2) * 4 * slots
    for shorter, longer in ((256, 1024), (1024, 4096)):
        assert moved[longer] - moved[shorter] <= per_token * (longer - shorter), moved
    assert moved[4096] <= 1.25 * moved[256]
