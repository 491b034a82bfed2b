"""Compiled programs as files: made on any machine for a topology, loaded on the TPU VM without compiling."""

import dataclasses
import hashlib
import json
import logging
from importlib import metadata
from pathlib import Path

import jax
from jax.experimental import serialize_executable

from ..sharding import Placement
from .fingerprint import differences, fingerprint_of

logger = logging.getLogger(__name__)

_SUFFIX = ".xla"


def save_executable(compiled, args, kwargs, folder, name, engine):
    """Write one compiled program, whole or not at all.

    Args:
        compiled: of `jit(...).lower(*args, **kwargs).compile()`.
        args, kwargs: what it was lowered for; shapes, dtypes and static values name the file.
        folder: created if missing.
        name: "prefill" or "decode_loop".
        engine: the `engine.Engine` it is of.

    Returns:
        the path written.
    """
    payload, _, _ = serialize_executable.serialize(compiled)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    pair = fingerprint_of(engine)
    path = folder / f"{name}-{signature(args, kwargs, pair)}{_SUFFIX}"
    facts = {**platform_facts(_devices_of(engine)), "pair": pair}
    _write(path.with_suffix(".json"), json.dumps(facts, indent=1).encode())  # first: no program is without its facts
    _write(path, payload)
    return path


def _write(path, content):
    scratch = path.with_name(path.name + ".part")
    try:
        scratch.write_bytes(content)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def signature(args, kwargs, pair):
    """Hash of all that a program is specialised for: shapes, dtypes, static values in and beside the arguments, and `pair`
    (of `fingerprint_of`)."""
    leaves = [
        (jax.tree_util.keystr(path), tuple(leaf.shape), str(leaf.dtype)) for path, leaf in jax.tree_util.tree_leaves_with_path(args)
    ]
    facts = [leaves, list(_statics(args)), sorted(kwargs.items()), pair]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _statics(node):
    """Names and values of a pytree's static fields. Not the mesh: a program is made for devices that are not here."""
    if dataclasses.is_dataclass(node):
        for field in dataclasses.fields(node):
            value = getattr(node, field.name)
            if not field.metadata.get("static"):
                yield from _statics(value)
            elif not isinstance(value, Placement):
                yield f"{type(node).__name__}.{field.name}={value!r}"
    elif isinstance(node, dict | tuple | list):
        for item in node.values() if isinstance(node, dict) else node:
            yield from _statics(item)


def _devices_of(engine):
    mesh = engine.decoder.target.placement.mesh
    return jax.devices()[:1] if mesh is None else list(mesh.devices.flat)


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
    """Let `engine` run programs saved for calls like its own; other calls are compiled as always.

    Args:
        engine: `engine.Engine` of the same model, draft, block size, cache and mesh shape as at saving.
        folder: of `save_executable`.

    Raises:
        FileNotFoundError: no saved program in `folder`.
        ValueError: the programs were made for another platform, device or version, or all of them for another target or draft;
            names both sides.
    """
    folder = Path(folder)
    facts = _facts_in(folder)
    if not facts:
        raise FileNotFoundError(
            f"folder: {folder} holds no saved program (*{_SUFFIX}); make some with: dflash-torchax compile ... --save {folder}"
        )
    devices, pair = _devices_of(engine), fingerprint_of(engine)
    here = platform_facts(devices)
    for file, there in facts.items():
        for key in there.keys() - {"pair"}:
            if there[key] != here.get(key):
                raise ValueError(
                    f"folder: {file.name} was compiled for {key} {there[key]!r}, this machine has {here.get(key)!r}; "
                    f"compile again for it, or use the saved programs where they belong."
                )
    _check_pair({file: there.get("pair", {}) for file, there in facts.items()}, pair)
    for name in ("prefill", "decode_loop"):
        setattr(engine, name, _Dispatch(getattr(engine, name), name, folder, devices, pair))


def _facts_in(folder):
    """Saved program -> its facts; one without facts was not written to its end."""
    files = {file: file.with_suffix(".json") for file in sorted(folder.glob("*" + _SUFFIX))}
    return {file: json.loads(facts.read_text()) for file, facts in files.items() if facts.is_file()}


def _check_pair(pairs, here):
    """Raise ValueError where none of the saved programs (file -> fingerprint) is of the pair `here`; names the closest's
    differences."""
    differing = {file: differences(there, here) for file, there in pairs.items()}
    closest = min(differing, key=lambda file: len(differing[file]))
    if differing[closest]:
        there, mine = (", ".join(f"{name} {values[i]!r}" for name, *values in differing[closest][:3]) for i in (0, 1))
        raise ValueError(
            f"folder: {closest.name} was compiled for {there}, but this engine has {mine}; "
            f"enable what the programs were made for, or compile again for this target, draft and cache."
        )


class _Dispatch:
    """A jitted function that runs a saved executable where one fits its arguments."""

    def __init__(self, function, name, folder, devices, pair):
        self.function, self.name, self.folder, self.devices, self.pair = function, name, folder, devices, pair
        self.loaded = {}

    def __call__(self, *args, **kwargs):
        key = signature(args, kwargs, self.pair)
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
            logger.info("%s: no saved program for this call; compiling", self.name)
            return None
        # Tracing gives the pytrees, which hold the mesh and cannot be stored; nothing is compiled.
        traced = self.function.trace(*args, **kwargs)
        in_tree = jax.tree.structure((args, {}))
        return serialize_executable.deserialize_and_load(
            path.read_bytes(), in_tree, jax.tree.structure(traced.out_info), execution_devices=self.devices
        )
