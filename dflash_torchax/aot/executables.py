"""Compiled programs as files: made on any machine for a topology, loaded on the TPU VM without compiling."""

import hashlib
import json
import logging
from importlib import metadata
from pathlib import Path

import jax
from jax.experimental import serialize_executable

logger = logging.getLogger(__name__)

_SUFFIX = ".xla"


def save_executable(compiled, args, kwargs, folder, name, devices):
    """Write one compiled program.

    Args:
        compiled: of `jit(...).lower(*args, **kwargs).compile()`.
        args, kwargs: what it was lowered for; shapes and dtypes name the file.
        folder: created if missing.
        name: "prefill" or "decode_loop".
        devices: devices it was compiled for.

    Returns:
        the path written.
    """
    payload, _, _ = serialize_executable.serialize(compiled)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{signature(args, kwargs)}{_SUFFIX}"
    path.write_bytes(payload)
    path.with_suffix(".json").write_text(json.dumps(platform_facts(devices), indent=1))
    return path


def signature(args, kwargs):
    """Hash of every shape and dtype that a program is specialised for, and of its static arguments."""
    leaves = [
        (jax.tree_util.keystr(path), tuple(leaf.shape), str(leaf.dtype)) for path, leaf in jax.tree_util.tree_leaves_with_path(args)
    ]
    return hashlib.sha256(json.dumps([leaves, sorted(kwargs.items())]).encode()).hexdigest()[:16]


def platform_facts(devices):
    """What has to match between the machine that compiled and the one that runs."""
    facts = {
        "jax": jax.__version__,
        "platform": devices[0].platform,
        "device_kind": devices[0].device_kind,
        "num_devices": len(devices),
    }
    return {**facts, "libtpu": metadata.version("libtpu")} if devices[0].platform == "tpu" else facts


def use_executables(engine, folder):
    """Let `engine` run programs saved for its shapes; shapes without a file are compiled as always.

    Args:
        engine: `engine.Engine` of the same model, draft, block size, cache and mesh shape as at saving.
        folder: of `save_executable`.

    Raises:
        FileNotFoundError: no saved program in `folder`.
        ValueError: the programs were made for another platform, device or version; names both sides.
    """
    folder = Path(folder)
    files = sorted(folder.glob("*" + _SUFFIX))
    if not files:
        raise FileNotFoundError(
            f"folder: {folder} holds no saved program (*{_SUFFIX}); make some with: dflash-torchax compile ... --save {folder}"
        )
    placement = engine.decoder.target.placement
    devices = list(placement.mesh.devices.flat) if placement.mesh is not None else jax.devices()[:1]
    here = platform_facts(devices)
    for file in files:
        there = json.loads(file.with_suffix(".json").read_text())
        for key in there:
            if there[key] != here.get(key):
                raise ValueError(
                    f"folder: {file.name} was compiled for {key} {there[key]!r}, this machine has {here.get(key)!r}; "
                    f"compile again for it, or use the saved programs where they belong."
                )
    engine.prefill = _Dispatch(engine.prefill, "prefill", folder, devices)
    engine.decode_loop = _Dispatch(engine.decode_loop, "decode_loop", folder, devices)


class _Dispatch:
    """A jitted function that runs a saved executable where one fits its arguments."""

    def __init__(self, function, name, folder, devices):
        self.function, self.name, self.folder, self.devices = function, name, folder, devices
        self.loaded = {}

    def __call__(self, *args, **kwargs):
        key = signature(args, kwargs)
        if key not in self.loaded:
            self.loaded[key] = self._load(key, args, kwargs)
        executable = self.loaded[key]
        if executable is None:
            return self.function(*args, **kwargs)
        # Small arrays come from the host on one device; what is in place already is not moved.
        return executable(*jax.device_put(args, executable.input_shardings[0]))

    def _load(self, key, args, kwargs):
        path = self.folder / f"{self.name}-{key}{_SUFFIX}"
        if not path.is_file():
            logger.info("%s: no saved program for these shapes; compiling", self.name)
            return None
        # Tracing gives the pytrees, which hold the mesh and cannot be stored; nothing is compiled.
        traced = self.function.trace(*args, **kwargs)
        in_tree = jax.tree.structure((args, {}))
        return serialize_executable.deserialize_and_load(
            path.read_bytes(), in_tree, jax.tree.structure(traced.out_info), execution_devices=self.devices
        )
