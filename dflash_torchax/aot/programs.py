"""Builds the engine of a pair from configs alone, on abstract weights, and compiles its programs for a topology."""

import dataclasses
import functools
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import torch
from accelerate import init_empty_weights
from huggingface_hub import hf_hub_download
from transformers import AutoConfig, AutoModelForCausalLM

from ..config import DFlashConfig
from ..draft_model import DFlashDraftModel
from ..engine import Engine
from ..sampling import greedy
from .presets import PRESETS

_EOS_IDS = 8


def read_config(name, part):
    """A config as a dict.

    Args:
        name: preset name, path of a config.json or of its folder, or a Hugging Face repo id.
        part: 0 for the target's, 1 for the draft's (of a preset).

    Raises:
        FileNotFoundError: nothing of that name.
    """
    if str(name).lower() in PRESETS:
        return PRESETS[str(name).lower()][part]
    path = Path(name).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        return json.loads(path.read_text())
    if path.is_absolute() or str(name).count("/") != 1:
        raise FileNotFoundError(f"config: {str(name)!r} is no preset ({', '.join(PRESETS)}), no config.json, no folder with one and no repo id like 'owner/name'.")
    return json.loads(Path(hf_hub_download(str(name), "config.json")).read_text())


def abstract_target(fields, num_layers=None):
    """HF model of a config dict on the meta device, in the config's dtype; `num_layers` cuts its depth."""
    fields = dict(fields)
    if num_layers is not None:
        fields = {**fields, "num_hidden_layers": num_layers, "layer_types": None}
    config = AutoConfig.for_model(**fields)
    with init_empty_weights(include_buffers=True):
        return AutoModelForCausalLM.from_config(config, dtype=config.dtype or torch.bfloat16).eval()


def abstract_draft(fields, taps=None, num_layers=None):
    """Draft of a config dict on the meta device; `taps` and `num_layers` cut it to a target of reduced depth."""
    fields = dict(fields)
    if taps is not None:
        fields["dflash_config"] = {**fields.get("dflash_config", {}), "target_layer_ids": list(taps)}
        fields["num_target_layers"] = None
    if num_layers is not None:
        fields["num_hidden_layers"] = num_layers
    with init_empty_weights(include_buffers=True):
        return DFlashDraftModel(DFlashConfig.from_dict(fields)).eval()


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes a program is compiled for: rows, context (prompt + output, tokens) and slots per block (None: the draft's)."""

    batch: int = 1
    context: int = 2048
    block_size: int | None = None


@dataclasses.dataclass
class Program:
    """A compiled program: its name, tokens of a row it reads at once, the executable and seconds it took to compile."""

    name: str
    width: int
    compiled: object
    seconds: float


class Compiler:
    """Compiles the programs of one target and draft for a mesh of compile-only devices.

    Args:
        target: HF model on meta.
        draft: `DFlashDraftModel` on meta, or None.
        mesh: of `topology.mesh_of`, or of real devices.
        shape: `Shape`.
        cache: as in `enable`.
    """

    def __init__(self, target, draft, mesh, shape, cache="auto", options=None):
        if shape.batch % mesh.shape["data"]:
            raise ValueError(f"batch: {shape.batch} rows do not divide over {mesh.shape['data']} data shards; give a multiple.")
        self.mesh, self.shape, self.options = mesh, shape, options
        build = functools.partial(Engine, target, mesh=mesh, cache=cache)
        self.plain = build()
        self.engine = build(draft, block_size=shape.block_size) if draft is not None else self.plain

    def prefill(self, width):
        """The prompt bucket of `width` tokens."""
        engine = self.engine
        batch = self.shape.batch
        prompt, row = self._ids(batch, width), self._ids(batch)
        return self._compile(f"prefill {width}", width, engine.prefill, engine.params, prompt, row, row, self._ids(_EOS_IDS), slots=self.slots(engine))

    def plain_step(self):
        """One autoregressive step."""
        return self._step(self.plain, "plain step")

    def dflash_step(self):
        """One propose-verify-accept-commit step."""
        return self._step(self.engine, f"DFlash step {self.engine.block_size}")

    def verify(self, width):
        """The target alone on `width` tokens a row, with the head and its argmax, K/V written."""
        decoder = self.plain.decoder

        def verify(params, state, drafted):
            state, logits = decoder.verify(params, state, drafted)
            return state, greedy(logits)

        engine = self.plain
        state = self.state(engine)
        return self._compile(f"verify {width}", width, jax.jit(verify, donate_argnums=1), engine.params, state, self._ids(self.shape.batch, width - 1))

    def slots(self, engine):
        """Slots per row: the context and one block, in whole tiles of 128."""
        return -(-(self.shape.context + engine.block_size) // 128) * 128

    def state(self, engine):
        """The abstract decode state, placed as the prefill leaves it."""
        row = self._ids(self.shape.batch)
        with self._meshed():
            lowered = engine.prefill.trace(engine.params, self._ids(self.shape.batch, 32), row, row, self._ids(_EOS_IDS), slots=self.slots(engine))
        placement = engine.decoder.target.placement
        shapes = jax.tree.map(lambda x: self._placed(placement, x.shape, x.dtype), lowered.out_info)
        return dataclasses.replace(shapes, **{name: _cache_placed(getattr(shapes, name)) for name in ("target_cache", "draft_cache")})

    def _step(self, engine, name):
        step = jax.jit(engine.decoder.step, donate_argnums=1)
        return self._compile(name, engine.block_size, step, engine.params, self.state(engine))

    def _ids(self, *shape):
        return self._placed(self.plain.decoder.target.placement, shape, jnp.int32)

    def _placed(self, placement, shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=placement.sharding())

    def _meshed(self):
        # Pallas asks the mesh for the TPU's generation.
        return jax.sharding.use_abstract_mesh(self.engine.decoder.target.placement.mesh.abstract_mesh)

    def _compile(self, name, width, function, *args, **kwargs):
        begin = time.perf_counter()
        with self._meshed():
            compiled = function.lower(*args, **kwargs).compile(self.options)
        return Program(name, width, compiled, time.perf_counter() - begin)


def _cache_placed(cache):
    """A cache of shapes with the placement it has at run time."""
    return cache.abstract() if hasattr(cache, "abstract") else cache
