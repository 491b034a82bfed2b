"""Where arrays live on a mesh: rules by HF parameter name for weights, and by head and row for caches.

Weights and activations are partitioned by XLA from these placements. Cache writes and attention run under
`jax.shard_map`, because neither a page table nor a Pallas kernel can be partitioned automatically.
"""

import dataclasses
import functools
import logging
import math
import re

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

logger = logging.getLogger(__name__)

# Axis names that split the batch; every other axis of a mesh splits heads, ffn and vocabulary.
DATA_AXES = ("data", "dp", "batch", "fsdp", "replica")

# Parameter name (the end of it) -> the axis that is split, counted from the front.
_RULES = (
    (r"(embed_tokens|embed_in|wte|lm_head|embed_out)\.weight", 0),
    (r"(q_proj|k_proj|v_proj|qkv_proj|query_key_value)\.(weight|bias)", 0),
    (r"(gate_proj|up_proj|gate_up_proj|dense_h_to_4h|fc1)\.(weight|bias)", 0),
    (r"(o_proj|attention\.dense|down_proj|dense_4h_to_h|fc2)\.weight", 1),
    (r"(^|\.)fc\.weight", 1),  # the draft's projection of the context feature
    (r"experts\.\w+", 0),
    (r"self_attn\.sinks", 0),
)
_PER_HEAD = re.compile(r"(q_proj|k_proj|v_proj|qkv_proj|query_key_value|o_proj|attention\.dense|sinks)")


@dataclasses.dataclass(frozen=True)
class Placement:
    """A mesh with its axes sorted into data and model; without a mesh every method changes nothing.

    Dimensions are named "data", "model" or None in all methods.
    """

    mesh: Mesh | None = None
    data: tuple[str, ...] = ()
    model: tuple[str, ...] = ()

    @classmethod
    def of(cls, mesh):
        """From any `jax.sharding.Mesh`: axes named in `DATA_AXES` split the batch, all others the model.

        Raises:
            TypeError: not a mesh.
        """
        if mesh is None:
            return cls()
        if not isinstance(mesh, Mesh):
            raise TypeError(
                f"mesh: expected a jax.sharding.Mesh, got {type(mesh).__name__}; make one with jax.make_mesh((n,), ('model',))."
            )
        data = tuple(name for name in mesh.axis_names if name in DATA_AXES)
        model = tuple(name for name in mesh.axis_names if name not in DATA_AXES)
        # Partitioning is left to XLA: HF code knows nothing of explicit shardings.
        auto = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
        return cls(auto, data, model)

    @property
    def num_data(self):
        return self._size(self.data)

    @property
    def num_model(self):
        return self._size(self.model)

    @property
    def platform(self):
        """Platform of the mesh's devices, else the default one."""
        return jax.default_backend() if self.mesh is None else self.mesh.devices.flat[0].platform

    def split(self, count, kind="model"):
        """`kind` where `count` divides over that kind's devices, else None (replicate)."""
        return kind if count % (self.num_model if kind == "model" else self.num_data) == 0 else None

    def spec(self, *dims):
        """PartitionSpec of named dimensions."""
        axes = {"data": self.data or None, "model": self.model or None, None: None}
        return PartitionSpec(*(axes[dim] for dim in dims))

    def sharding(self, *dims):
        """NamedSharding of named dimensions (needs a mesh)."""
        return NamedSharding(self.mesh, self.spec(*dims))

    def constrain(self, array, *dims):
        """Inside a trace: fix how XLA lays out `array`; dimensions not given are replicated."""
        return array if self.mesh is None else jax.lax.with_sharding_constraint(array, self.sharding(*dims))

    def map(self, function, in_dims, out_dims):
        """`function` run per device on its own part; dims are pytrees of tuples of named dimensions."""
        if self.mesh is None:
            return function
        to_specs = lambda tree: jax.tree.map(lambda dims: self.spec(*dims), tree, is_leaf=_is_dims)
        return jax.shard_map(function, mesh=self.mesh, in_specs=to_specs(in_dims), out_specs=to_specs(out_dims), check_vma=False)

    def _size(self, axes):
        return math.prod(self.mesh.shape[axis] for axis in axes) if self.mesh is not None else 1


def _is_dims(node):
    return isinstance(node, tuple) and all(dim in ("data", "model", None) for dim in node)


def parameter_dims(name, shape, placement, config):
    """How the parameter `name` is split.

    Args:
        name: HF parameter name; `config` is its model's (text) config.
        shape: its shape.

    Returns:
        a tuple of named dimensions. A parameter that no rule names, or whose axis does not divide, is replicated.
    """
    for pattern, axis in _RULES:
        if not re.search(pattern + "$", name) or len(shape) <= axis:
            continue
        dims = [None] * len(shape)
        even = placement.split(shape[axis])
        if even is not None and _PER_HEAD.search(name):
            even = placement.split(_kv_heads(config))
        if even is None:
            _warn_replicated(re.sub(r"\.\d+\.", ".*.", name), tuple(shape), _kv_heads(config), placement.num_model)
        dims[axis] = even
        return tuple(dims)
    return (None,) * len(shape)


@functools.cache  # once for all layers
def _warn_replicated(name, shape, kv_heads, num_devices):
    logger.warning(
        "%s: shape %s with %d kv heads does not divide over %d devices; it is replicated on each",
        name,
        shape,
        kv_heads,
        num_devices,
    )


def _kv_heads(config):
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def place_on(mesh, config):
    """`place` for `load_target` and `params_of`: each tensor goes to the mesh part by part, never whole to a device.

    Args:
        mesh: `jax.sharding.Mesh` or `Placement`.
        config: HF config of the model (or of the draft's backbone) the tensors belong to.

    Returns:
        function (name, numpy array) -> sharded JAX array.
    """
    placement = mesh if isinstance(mesh, Placement) else Placement.of(mesh)
    text = config.get_text_config(decoder=True)

    def place(name, host):
        sharding = placement.sharding(*parameter_dims(name, host.shape, placement, text))
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return place


def reshard(params, placement, config):
    """A params dict laid out by the rules; arrays already there are not moved, abstract ones get the sharding."""
    if placement.mesh is None:
        return params
    text = config.get_text_config(decoder=True)

    def put(name, array):
        sharding = placement.sharding(*parameter_dims(name, array.shape, placement, text))
        if isinstance(array, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
        return jax.device_put(array, sharding)

    return {name: put(name, array) for name, array in params.items()}
