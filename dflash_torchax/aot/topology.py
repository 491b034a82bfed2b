"""TPU topologies without a TPU: libtpu's compiler, and the public facts of each chip."""

import contextlib
import dataclasses
import io
import os
from importlib import metadata

import jax
import numpy as np

# The compiler plugin has to be the one jax was built with; extra [tpu] installs it.
LIBTPU_FOR_JAX = {"0.10.2": "0.0.42.1"}
EXAMPLES = ("v5p:2x2x1", "v5e:2x2", "v6e:2x2")


@dataclasses.dataclass(frozen=True)
class Chip:
    """One chip as its vendor publishes it: dense bfloat16 FLOP/s, HBM bytes/s and HBM bytes."""

    name: str
    flops: float
    bandwidth: float
    hbm: int

    def crossover(self, bytes_per_weight=2):
        """Tokens a weight must serve before multiplying costs more time than reading it."""
        return self.flops / self.bandwidth * bytes_per_weight / 2


CHIPS = {
    "v4": Chip("v4", 275e12, 1228e9, 32 << 30),
    "v5e": Chip("v5e", 197e12, 819e9, 16 << 30),
    "v5p": Chip("v5p", 459e12, 2765e9, 95 << 30),
    "v6e": Chip("v6e", 918e12, 1640e9, 32 << 30),
}
_ACCELERATOR = {"v4": "v4-8", "v5e": "v5litepod-4", "v5p": "v5p-8", "v6e": "v6e-4"}


def chip_of(topology_name):
    """The `Chip` of a name like "v5p:2x2x1".

    Raises:
        ValueError: no such chip.
    """
    chip = CHIPS.get(str(topology_name).partition(":")[0])
    if chip is None or ":" not in str(topology_name):
        raise ValueError(
            f"topology: {topology_name!r}; give chip:shape with a chip of {', '.join(CHIPS)}, e.g. {', '.join(EXAMPLES)}."
        )
    return chip


def devices_of(topology_name):
    """The topology's devices, as compile targets.

    Raises:
        ImportError: libtpu is not installed.
        ValueError: libtpu is of another version than jax needs, or does not know the topology.
    """
    chip = chip_of(topology_name)
    check_libtpu()
    from jax.experimental import topologies

    # No TPU is asked for its metadata, and another process's libtpu lock does not matter to a compiler.
    settings = {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": _ACCELERATOR[chip.name],
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    jax.default_backend()  # the process's own backend first: the compiler must not become it
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return list(topologies.get_topology_desc(platform="tpu", topology_name=topology_name).devices)
    except Exception as error:
        raise ValueError(
            f"topology: libtpu cannot make {topology_name!r}: {str(error).strip().splitlines()[0]}. "
            f"Shapes it knows are for instance {', '.join(EXAMPLES)}."
        ) from error


def check_libtpu():
    """libtpu's version; ImportError without libtpu, ValueError where it is not the version this jax needs."""
    wanted = LIBTPU_FOR_JAX.get(jax.__version__)
    install = f"pip install libtpu=={wanted}" if wanted else f"pip install 'jax[tpu]=={jax.__version__}'"
    try:
        have = metadata.version("libtpu")
    except metadata.PackageNotFoundError:
        raise ImportError(f"libtpu, which holds the TPU compiler, is not installed. Run: {install} (it needs no TPU).") from None
    if wanted is not None and have != wanted:
        raise ValueError(f"libtpu: version {have} is installed, but jax {jax.__version__} needs {wanted}. Run: {install}")
    return have


def mesh_of(topology_name, num_model=1, num_data=1):
    """A ("data", "model") mesh over the first chips of a topology.

    Raises:
        ValueError: the topology has fewer chips; and as `devices_of`.
    """
    devices = devices_of(topology_name)
    wanted = num_model * num_data
    if wanted < 1 or wanted > len(devices):
        raise ValueError(
            f"tp: {num_model} x {num_data} chips asked for, but {topology_name} has {len(devices)}; "
            f"lower tp or name a larger topology."
        )
    return jax.sharding.Mesh(np.array(devices[:wanted]).reshape(num_data, num_model), ("data", "model"))
