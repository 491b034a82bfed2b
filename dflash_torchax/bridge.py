"""The only file that imports torchax: torch modules as pure functions of JAX arrays.

A module stays where it is (CPU or meta). `params_of` reads its tensors as a flat dict of JAX arrays and
`functionalize` runs torch code on it with that dict swapped in, inside whatever `jax.jit` is tracing.
"""

import contextvars
import functools
import math
import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch

# Tracing swaps attributes of a shared module and torchax's environment is one object: one trace at a time.
_TRACE_LOCK = threading.RLock()
# Widest batch of rows for which XLA:CPU gains from the transposed product.
_CPU_FEW_ROWS = 32
_CPU_HIDING_ZEROS = 64
# (platform, dtype of the products' operands or None) of the module being traced.
_LOWERING = contextvars.ContextVar("dflash_torchax_lowering", default=("tpu", None))


@functools.cache
def _environment():
    """A private torchax environment, so that overriding an op changes nothing for other torchax users."""
    import torchax
    from torchax.tensor import Environment

    del torchax  # imported for its registration side effects
    env = Environment()
    env.override_op_definition(
        torch.nn.functional.linear,
        lambda x, weight, bias=None: env.j2t_iso(_linear(*env.t2j_iso((x, weight, bias)))),
    )
    return env


def _linear(x, weight, bias=None):
    """x @ weight.T + bias, shaped for how the platform multiplies few rows by a large matrix."""
    rows, (platform, products) = math.prod(x.shape[:-1]), _LOWERING.get()
    if products is not None:
        out = mixed_product(x.reshape(rows, x.shape[-1]), weight, products, platform).reshape(*x.shape[:-1], -1)
    elif platform == "cpu" and 1 < rows <= _CPU_FEW_ROWS:
        out = _cpu_few_rows(x.reshape(rows, x.shape[-1]), weight).reshape(*x.shape[:-1], -1)
    else:
        out = jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))
    return out if bias is None else out + bias


def _cpu_few_rows(x, weight):
    """XLA:CPU reads a weight fastest as the left operand, as stored, and eight rows cost no more than two.

    The barrier keeps XLA from folding the transpose back into the slow form.
    """
    padded = jnp.pad(x, ((0, -x.shape[0] % 8), (0, 0)))
    out = jax.lax.optimization_barrier(jax.lax.dot_general(weight, padded, (((1,), (1,)), ((), ()))))
    return out[:, : x.shape[0]].T


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def mixed_product(x, weight, dtype, platform):
    """x [rows, in] @ weight [out, in].T with operands rounded to `dtype` and accumulated in float32, gradients too."""
    return _dot_last(x.astype(dtype), weight.astype(dtype))


def _mixed_forward(x, weight, dtype, platform):
    x, weight = x.astype(dtype), weight.astype(dtype)
    return _dot_last(x, weight), (x, weight)


def _mixed_backward(dtype, platform, operands, gradient):
    # XLA:CPU widens the operands of a product that it sees is of a transpose; zeros behind it keep it from seeing.
    hide = lambda a: jnp.pad(a, ((0, 0), (0, _CPU_HIDING_ZEROS))) if platform == "cpu" else a
    (x, weight), gradient = operands, gradient.astype(dtype)
    return _dot_last(hide(gradient), hide(weight.T)), _dot_last(hide(gradient.T), hide(x.T))


mixed_product.defvjp(_mixed_forward, _mixed_backward)


def _dot_last(a, b):
    return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def torch_view(tree):
    """JAX arrays of a pytree seen as torch tensors, without a copy; anything else passes unchanged."""
    return _environment().j2t_iso(tree)


def jax_view(tree):
    """The reverse of `torch_view`."""
    return _environment().t2j_iso(tree)


class Functional:
    """A torch module as a pure function: `self(params, body, *args)` runs `body(module, *args)`.

    Args:
        module: any `nn.Module`; its own tensors are never read here and may be on the meta device.
        platform: "cpu" or "tpu", the device the traced program is compiled for.
        products: dtype that the operands of linear layers are rounded to, accumulating in float32; None computes in theirs.
    """

    def __init__(self, module, platform, products=None):
        self.module = module
        self.platform = platform
        self.products = products
        self.aliases = _aliases(module)

    def __call__(self, params, body, *args):
        """Run `body(module, *args)` on `params` (name -> array); arrays in and out are JAX arrays.

        Raises:
            KeyError: `params` lacks a tensor of the module.
        """
        swapped = {f"module.{name}": params[name] for name in params}
        swapped |= {f"module.{name}": params[owner] for name, owner in self.aliases.items()}
        token = _LOWERING.set((self.platform, self.products))
        try:
            # A TPU would multiply float32 in bfloat16 passes by default; bfloat16 operands are not affected.
            with _TRACE_LOCK, _environment(), torch.no_grad(), jax.default_matmul_precision("highest"):
                result = torch.func.functional_call(
                    _Body(self.module), torch_view(swapped), (body, *torch_view(args)), tie_weights=False
                )
                return jax_view(result)
        finally:
            _LOWERING.reset(token)


class _Body(torch.nn.Module):
    """Gives `functional_call` a forward that runs any function of the wrapped module."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, body, *args):
        return body(self.module, *args)


def functionalize(module, platform, products=None):
    """`Functional(module, platform, products)`: see there."""
    return Functional(module, platform, products)


def _named_tensors(module):
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _aliases(module):
    """Names of tied tensors -> the name under which `params_of` keeps them."""
    owners, aliases = {}, {}
    for name, tensor in _named_tensors(module):
        owner = owners.setdefault(id(tensor), name)
        if owner != name:
            aliases[name] = owner
    return aliases


def params_of(module, dtype=None, place=None):
    """The module's parameters and buffers as a flat dict, tied tensors once.

    Args:
        module: torch module on the CPU, or on meta (then the values are `jax.ShapeDtypeStruct`).
        dtype: JAX dtype for the floating point tensors; None keeps theirs.
        place: function (name, numpy array) -> JAX array; default is the default device.

    Returns:
        dict of name -> array. CPU arrays may share memory with the module: call `enable` again after
        changing weights.
    """
    aliases = _aliases(module)
    return {
        name: to_jax(tensor, dtype, None if place is None else functools.partial(place, name))
        for name, tensor in _named_tensors(module)
        if name not in aliases
    }


def to_jax(tensor, dtype=None, place=None):
    """One torch tensor as a JAX array (or a `ShapeDtypeStruct` for a meta tensor); int64 becomes int32."""
    target = jax_dtype(tensor.dtype)
    if dtype is not None and jnp.issubdtype(target, jnp.floating):
        target = jnp.dtype(dtype)
    if tensor.device.type == "meta":
        return jax.ShapeDtypeStruct(tuple(tensor.shape), target)
    host = _numpy(tensor.detach().cpu().contiguous())
    if host.dtype != target:
        host = host.astype(target)
    return jnp.asarray(host) if place is None else place(host)


def _numpy(tensor):
    if tensor.dtype == torch.bfloat16:  # numpy has no bfloat16 of its own
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def jax_dtype(dtype):
    """torch dtype -> the numpy dtype JAX uses for it with x64 off."""
    if dtype == torch.bfloat16:
        return jnp.dtype(jnp.bfloat16)
    dtype = torch.empty((), dtype=dtype).numpy().dtype
    return {np.dtype("int64"): np.dtype("int32"), np.dtype("float64"): np.dtype("float32")}.get(dtype, dtype)


def torch_dtype(dtype):
    """JAX dtype -> torch dtype."""
    return torch.bfloat16 if jnp.dtype(dtype) == jnp.bfloat16 else torch.from_numpy(np.empty((), dtype)).dtype
