"""Where a measurement was made: device, versions, commit; and what a call needs in compile time and memory."""

import contextlib
import ctypes
import datetime
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import jax

_PACKAGES = ("torch", "torchax", "jax", "jaxlib", "transformers", "accelerate", "numpy", "libtpu", "dflash")
_COMPILE_EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}


def describe():
    """A dict of facts about this machine and installation; no host names, no paths."""
    device = jax.devices()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "device": device.device_kind,
        "platform": device.platform,
        "devices": jax.device_count(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "load_average_at_start": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES if _version(name)} | {"dflash_torchax": _own_version()},
        "commit": _commit(),
    }


def _version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _own_version():
    from .._about import VERSION

    return VERSION


def _cpu_model():
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _memory_gib():
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    return None


def _commit():
    """Commit of the source tree this package runs from, with '+' where it has changes; None for an installed one."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:

        def git(*args):
            return subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, timeout=10, check=True).stdout

        return git("rev-parse", "--short=12", "HEAD").strip() + (
            "+" if git("status", "--porcelain", "--untracked-files=no").strip() else ""
        )
    except (OSError, subprocess.SubprocessError):
        return None


@contextlib.contextmanager
def compile_clock():
    """Yield a dict that adds up what JAX spends on programs meanwhile: seconds to trace, lower, compile, and programs."""
    spent = {"trace": 0.0, "lower": 0.0, "compile": 0.0, "programs": 0}

    def listen(event, seconds, **_):
        part = _COMPILE_EVENTS.get(event)
        if part is not None:
            spent[part] += seconds
            spent["programs"] += part == "compile"

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield spent
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def peak_memory(call):
    """Bytes that `call()` needs at its peak beyond what the process held before, or None where that cannot be told.

    On an accelerator: the device's peak, weights included. On Linux: growth of the resident set, after freed memory
    was given back and the kernel's high-water mark was reset.
    """
    stats = jax.devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        call()
        return jax.devices()[0].memory_stats()["peak_bytes_in_use"]
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as reset:
            reset.write("5")
        before = _status("VmRSS")
        call()
        return max(_status("VmHWM") - before, 0)
    except (OSError, KeyError):
        return None


def _status(field):
    with open("/proc/self/status", encoding="ascii", errors="replace") as lines:
        fields = dict(line.split(":", 1) for line in lines)
    return int(fields[field].split()[0]) * 1024
