"""Loading from safetensors, one tensor at a time, onto modules that were built empty with accelerate."""

import json
import logging
import os
from pathlib import Path

import torch
from accelerate import init_empty_weights
from huggingface_hub import snapshot_download
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from . import bridge
from .config import DFlashConfig, read_vocabulary
from .draft_model import DFlashDraftModel
from .eagle3 import read_eagle3
from .eagle3_model import is_eagle3
from .sharding import place_on

logger = logging.getLogger(__name__)

# Attribute of a meta-device model under which `load_target` leaves its JAX arrays for `enable`.
PARAMS_ATTRIBUTE = "_dflash_torchax_params"


def load_draft(path_or_repo, *, dtype=None, revision=None):
    """Load a draft: DFlash (z-lab v1 layout) or EAGLE-3 (SafeAILab's, vLLM's or speculators' layout).

    Args:
        path_or_repo: folder with config.json and safetensors, or a Hugging Face repo id.
        dtype: torch dtype of the weights or its name; None or "auto" keeps the checkpoint's. `enable` casts to the target's anyway.
        revision: repo revision.

    Returns:
        `DFlashDraftModel` or `Eagle3DraftModel` on the CPU, in eval mode.

    Raises:
        FileNotFoundError: no such folder or file.
        ValueError: a config field or tensor is missing, unexpected, misshapen or not finite.
    """
    dtype = _dtype(dtype)
    folder = _local_folder(path_or_repo, revision, also=("pytorch_model*.bin",))
    fields = json.loads(_file(folder, "config.json").read_text())
    if is_eagle3(fields):
        return read_eagle3(folder, fields, dtype)
    config = DFlashConfig.from_dict(fields)
    ids = read_vocabulary(folder, config)
    with init_empty_weights(include_buffers=False):
        draft = DFlashDraftModel(config, None if ids is None else torch.tensor(ids))
    expected = {name: tuple(p.shape) for name, p in draft.named_parameters()}
    for name, tensor in _checked_tensors(folder, expected, ignored=("rotary_emb.inv_freq",)):
        owner, _, leaf = name.rpartition(".")
        value = tensor.clone() if dtype is None else tensor.to(dtype, copy=True)
        setattr(draft.get_submodule(owner), leaf, torch.nn.Parameter(value, requires_grad=False))
    return draft.eval()


def load_target(path_or_repo, *, dtype=None, place=None, mesh=None, revision=None):
    """Load an HF causal language model straight into JAX arrays; no second copy of the weights stays on the host.

    Args:
        path_or_repo: folder with config.json and safetensors, or a Hugging Face repo id.
        dtype: torch dtype or its name; None or "auto" takes the config's.
        place: function (name, numpy array) -> JAX array, to put each tensor where it belongs; None puts on the default device.
        mesh: `jax.sharding.Mesh`, short for `place=sharding.place_on(mesh, config)`: each tensor goes to the mesh in parts.
        revision: repo revision.

    Returns:
        The HF model on the meta device, to be passed to `enable`; its arrays travel with it.

    Raises:
        FileNotFoundError, ValueError: as `load_draft`.
    """
    folder = _local_folder(path_or_repo, revision)
    _file(folder, "config.json")
    config = AutoConfig.from_pretrained(folder)
    dtype = _dtype(dtype) or config.dtype or torch.float32
    place = place_on(mesh, config) if mesh is not None and place is None else place
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.tie_weights()
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    expected = {name: tuple(p.shape) for name, p in model.named_parameters()}
    tied = tuple(name for name, _ in model.named_parameters(remove_duplicate=False) if name not in expected)
    params = {name: bridge.to_jax(buffer) for name, buffer in model.named_buffers()}
    for name, tensor in _checked_tensors(folder, expected, ignored=tied):
        put = None if place is None else lambda host, name=name: place(name, host)
        params[name] = bridge.to_jax(tensor, bridge.jax_dtype(dtype), put)
    setattr(model, PARAMS_ATTRIBUTE, params)
    return model


def _dtype(dtype):
    """HF's spellings of a dtype: a torch dtype, its name, "auto" or None."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is None or dtype == "auto":
        return None
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"dtype: {dtype!r}; give a floating point torch dtype or its name, e.g. 'bfloat16'.")
    return found


def _local_folder(path_or_repo, revision, also=()):
    if not isinstance(path_or_repo, (str, os.PathLike)):
        raise TypeError(f"path_or_repo: {path_or_repo!r}; give a folder or a repo id like 'owner/name'.")
    folder = Path(path_or_repo).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute() or str(path_or_repo).count("/") != 1:
        raise FileNotFoundError(f"path_or_repo: {str(path_or_repo)!r} is neither a folder nor a repo id like 'owner/name'")
    return Path(snapshot_download(str(path_or_repo), revision=revision, allow_patterns=["*.json", "*.safetensors", *also]))


def _file(folder, name):
    if not (folder / name).is_file():
        raise FileNotFoundError(f"path_or_repo: {folder} has no {name}; it is not a checkpoint in HF layout")
    return folder / name


def _checked_tensors(folder, expected, ignored=()):
    """Yield (name, torch tensor) of every expected tensor; raise ValueError on the first that is wrong."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"path_or_repo: {folder} has no .safetensors file; convert the checkpoint to safetensors")
    missing = set(expected)
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safe_open has no iterator)
                if name in ignored:
                    continue
                if name not in expected:
                    raise ValueError(f"{name}: unexpected tensor in {file}; this model has no such parameter. "
                                     f"Check that config.json belongs to these weights.")
                tensor = tensors.get_tensor(name)
                if tuple(tensor.shape) != expected[name]:
                    raise ValueError(f"{name}: shape {tuple(tensor.shape)} in {file}, but the config asks for {expected[name]}. "
                                     f"Check that config.json belongs to these weights.")
                if not torch.isfinite(tensor).all():
                    raise ValueError(f"{name}: NaN or infinity in {file}; the checkpoint is damaged, fetch or save it again.")
                missing.discard(name)
                yield name, tensor
    if missing:
        raise ValueError(f"{', '.join(sorted(missing)[:5])}: missing from {folder} ({len(missing)} tensors); "
                         f"the checkpoint is incomplete, fetch or save it again.")
