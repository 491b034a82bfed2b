"""Checkpoints of a training run: one safetensors file, replaced by a rename, that resumes to the same numbers."""

import json
import os

import jax
import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file


def save(file, params, optimizer_state, record, identity):
    """Write parameters, optimizer state, and JSON-able: the record, and the `identity` of what is trained."""
    arrays = {f"params.{name}": np.asarray(value) for name, value in params.items()}
    arrays |= {f"optimizer.{i:04d}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(optimizer_state))}
    scratch = file.with_name("writing-" + file.name)
    save_file(arrays, scratch, metadata={"record": json.dumps(record), "identity": json.dumps(identity)})
    os.replace(scratch, file)


def load(file, params, optimizer_state, identity):
    """(params, optimizer_state, record) as saved; the arguments give names, structure and what is trained.

    `optimizer_state` None reads none.

    Raises:
        ValueError: the checkpoint is another draft's: of other shapes, or of another `identity`.
    """
    with safe_open(file, framework="numpy") as opened:
        record, saved = (json.loads(opened.metadata()[name]) for name in ("record", "identity"))
    for name, value in identity.items():
        if saved.get(name) != value:
            raise ValueError(f"{name}: {value}, but {file} was trained with {saved.get(name)}; give the options that run "
                             f"began with, or the new run another name.")
    arrays = load_file(file)
    if optimizer_state is None:
        arrays = {name: array for name, array in arrays.items() if name.startswith("params.")}
    leaves, structure = jax.tree.flatten(optimizer_state)
    expected = {f"params.{name}": np.shape(value) for name, value in params.items()}
    expected |= {f"optimizer.{i:04d}": np.shape(leaf) for i, leaf in enumerate(leaves)}
    found = {name: array.shape for name, array in arrays.items()}
    if found != expected:
        wrong = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
        raise ValueError(f"checkpoint: {file} does not fit this draft: {wrong[0]} is {found.get(wrong[0])} there, "
                         f"{expected.get(wrong[0])} here ({len(wrong)} tensors differ). Use another output folder.")
    restored = [arrays[f"optimizer.{i:04d}"] for i in range(len(leaves))]
    return {name: arrays[f"params.{name}"] for name in params}, jax.tree.unflatten(structure, restored), record
