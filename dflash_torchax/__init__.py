"""DFlash speculative decoding for Hugging Face PyTorch models on TPU, through torchax and XLA.

Importing this package starts nothing: no device is touched and no compiler runs until `enable`.
"""

from importlib import import_module

from ._about import VERSION
from ._versions import check_versions

check_versions()

__version__ = VERSION

# Public name -> module that defines it; resolved on first use so that importing stays cheap.
_EXPORTS = {
    "enable": "api",
    "disable": "api",
    "enabled": "api",
    "last_stats": "api",
    "stream_blocks": "api",
    "load_draft": "loading",
    "load_target": "loading",
    "load_embedded": "embedded",
    "DFlashConfig": "config",
    "PagedCache": "cache_factory",
    "DFlashDraftModel": "draft_model",
    "DecodeStats": "state",
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name):
    if name in _EXPORTS:
        return getattr(import_module(f".{_EXPORTS[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted(__all__)
