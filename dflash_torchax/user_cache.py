"""Where things are kept between runs: converted weights and XLA's compiled programs."""

import os
from pathlib import Path

import jax

_OFF = ("0", "off", "false", "no")


def cache_dir():
    """The user cache folder: $DFLASH_TORCHAX_CACHE, else $XDG_CACHE_HOME/dflash_torchax, else ~/.cache/dflash_torchax."""
    chosen = os.environ.get("DFLASH_TORCHAX_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash_torchax"


def use_compilation_cache():
    """Turn JAX's persistent compilation cache on, unless the user chose a folder or switched it off.

    Off switch: DFLASH_TORCHAX_COMPILATION_CACHE=0. A folder set through JAX itself is left alone.
    """
    if os.environ.get("DFLASH_TORCHAX_COMPILATION_CACHE", "1").lower() in _OFF or jax.config.jax_compilation_cache_dir:
        return
    folder = cache_dir() / "xla"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # a read-only home: compile every time rather than fail
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
