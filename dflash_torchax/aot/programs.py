"""Builds the engine of a pair from configs alone, on abstract weights, and compiles its programs for a topology."""

import dataclasses
import json
import math
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import torch
from accelerate import init_empty_weights
from huggingface_hub import hf_hub_download
from transformers import AutoConfig, AutoModelForCausalLM

from ..config import DFlashConfig
from ..draft_model import DFlashDraftModel
from ..engine import _MIN_EOS, _MIN_SLOTS, Engine, bucket, host_rules
from ..sampling import greedy
from .presets import PRESETS


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
        raise FileNotFoundError(
            f"config: {str(name)!r} is no preset ({', '.join(PRESETS)}), no config.json, "
            f"no folder with one and no repo id like 'owner/name'."
        )
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
    """Sizes a program is compiled for.

    Fields:
        batch: rows.
        context: prompt + output, tokens.
        block_size: slots per block; None takes the draft's.
        as_served: cache lengths as `enable(max_length=context)` makes them, for programs that are saved.
    """

    batch: int = 1
    context: int = 2048
    block_size: int | None = None
    as_served: bool = False


@dataclasses.dataclass
class Program:
    """A compiled program: its name, tokens of a row it reads at once, the executable and seconds it took to compile, and
    what it was compiled for."""

    name: str
    width: int
    compiled: object
    seconds: float
    args: tuple
    kwargs: dict


class CapacityError(ValueError):
    """A program needs more HBM than a device has."""


class Compiler:
    """Compiles the programs of one target and draft for a mesh of compile-only devices.

    Args:
        target: HF model on meta.
        draft: `DFlashDraftModel` on meta, or None.
        mesh: of `topology.mesh_of`, or of real devices.
        shape: `Shape`.
        cache: as in `enable`.
        options: XLA compiler options, a dict.

    Raises:
        ValueError: rows do not divide over the data axis; `CapacityError`: a program does not fit into HBM.
    """

    def __init__(self, target, draft, mesh, shape, cache="auto", options=None):
        if shape.batch % mesh.shape["data"]:
            raise ValueError(f"batch: {shape.batch} rows do not divide over {mesh.shape['data']} data shards; give a multiple.")
        self.mesh, self.shape, self.options = mesh, shape, options
        self.plain = Engine(target, mesh=mesh, cache=cache)
        self.engine = self.plain
        if draft is not None:
            self.engine = Engine(self.plain, draft, block_size=shape.block_size, mesh=mesh, cache=cache)

    def prefill(self, width):
        """The prompt bucket of `width` tokens."""
        args, static = self._prompt(self.engine, width)
        return self._compile(f"prefill {width}", width, self.engine.prefill, *args, **static)

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
        return self._compile(
            f"verify {width}",
            width,
            jax.jit(verify, donate_argnums=1),
            engine.params,
            state,
            self._ids(self.shape.batch, width - 1),
        )

    def slots(self, engine):
        """Slots per row: the context and one block, as the engine's power of two or, for estimates, in tiles of 128."""
        slots = self.shape.context + engine.block_size
        return bucket(slots, _MIN_SLOTS) if self.shape.as_served else -(-slots // 128) * 128

    def state(self, engine):
        """The abstract decode state, placed as the prefill leaves it."""
        args, static = self._prompt(engine, 32)
        with self._meshed():
            traced = engine.prefill.trace(*args, **static)
        placement = engine.decoder.target.placement
        shapes = jax.tree.map(lambda x: self._placed(placement, x.shape, x.dtype), traced.out_info)
        return dataclasses.replace(
            shapes, **{name: _cache_placed(getattr(shapes, name)) for name in ("target_cache", "draft_cache")}
        )

    def decode_loop(self):
        """The loop of steps that `generate` runs."""
        engine = self.engine
        return self._compile("decode_loop", engine.block_size, engine.decode_loop, engine.params, self.state(engine))

    def argument_bytes(self):
        """Weights and caches of the DFlash step on one device, known without compiling."""
        return sum(device_bytes(leaf) for leaf in jax.tree.leaves((self.engine.params, self.state(self.engine))))

    def _step(self, engine, name):
        step = jax.jit(engine.decoder.step, donate_argnums=1)
        return self._compile(name, engine.block_size, step, engine.params, self.state(engine))

    def _prompt(self, engine, width):
        """(arguments, static arguments) of a prefill of `width` tokens a row."""
        row = self._ids(self.shape.batch)
        args = engine.params, self._ids(self.shape.batch, width), row, row, self._ids(_MIN_EOS), self._rules()
        return args, {"slots": self.slots(engine), "keep_cache": False}

    def _rules(self):
        placement = self.plain.decoder.target.placement
        return jax.tree.map(lambda x: self._placed(placement, x.shape, x.dtype), host_rules(self.shape.batch))

    def _ids(self, *shape):
        return self._placed(self.plain.decoder.target.placement, shape, jnp.int32)

    def _placed(self, placement, shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=placement.sharding())

    def _meshed(self):
        # Pallas asks the mesh for the TPU's generation.
        return jax.sharding.use_abstract_mesh(self.engine.decoder.target.placement.mesh.abstract_mesh)

    def _compile(self, name, width, function, *args, **kwargs):
        begin = time.perf_counter()
        with self._meshed(), warnings.catch_warnings():
            # Programs of absent devices are written to JAX's cache but cannot be read back from it.
            warnings.filterwarnings("ignore", message="Error (reading|writing) persistent compilation cache")
            lowered = function.lower(*args, **kwargs)
            try:
                compiled = lowered.compile(self.options)
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                raise CapacityError(f"{name}: {' '.join(str(error).split())[:500]}") from error
        return Program(name, width, compiled, time.perf_counter() - begin, args, kwargs)


def device_bytes(array):
    """Bytes of a placed (abstract) array on one device."""
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def _cache_placed(cache):
    """A cache of shapes with the placement it has at run time."""
    return cache.abstract() if hasattr(cache, "abstract") else cache
