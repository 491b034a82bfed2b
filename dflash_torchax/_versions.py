"""Checks at import that torch and torchax fit together, and names the fix when they do not."""

import re
from importlib.metadata import PackageNotFoundError, version

_FIX = "pip install 'torch==2.13.0' 'torchax==0.0.14.dev20261026' 'jax==0.10.2'"


def _release(text):
    """'0.0.14.dev20261026' -> (0, 0, 14): the numbers before any suffix."""
    return tuple(int(part) for part in re.match(r"\d+(?:\.\d+)*", text)[0].split("."))


def check_versions(installed=version):
    """Raise ImportError when torch, torchax or jax is missing or a known-broken pair is installed.

    Args:
        installed: function from a package name to its version string (`importlib.metadata.version`).
    """
    found = {}
    for package in ("torch", "torchax", "jax"):
        try:
            found[package] = installed(package)
        except PackageNotFoundError:
            raise ImportError(f"dflash_torchax needs {package}, which is not installed. Run: {_FIX}") from None
    # torchax up to 0.0.13 registers a lowering for an aten.prod overload that torch 2.13 removed.
    if _release(found["torchax"]) < (0, 0, 14) and _release(found["torch"]) >= (2, 13):
        raise ImportError(
            f"torchax {found['torchax']} does not work with torch {found['torch']} (its import fails on aten.prod). "
            f"Run: {_FIX}, or stay on torch<2.13 with torchax 0.0.13."
        )
