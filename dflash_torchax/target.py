"""The target model as pure functions: `embed`, `forward`, `head`, `unembed`.

HF code runs unmodified, on a private skeleton of the user's model (same modules, meta tensors), so the user's
model is never touched. What the engine needs to know of an architecture (cache layout, depth, width) is read
off one abstract trace instead of off config fields.
"""

import contextlib
import copy
import dataclasses
import inspect

import jax
import jax.numpy as jnp
import torch
from transformers.modeling_outputs import BaseModelOutputWithPast

from . import attention, bridge
from .cache import LentCache
from .loading import PARAMS_ATTRIBUTE
from .sharding import Placement


@dataclasses.dataclass(frozen=True)
class TargetOutput:
    """hidden [batch, width, hidden], feature [batch, width, taps * hidden] (or None), the written cache."""

    hidden: jax.Array
    feature: jax.Array | None
    cache: object


class Target:
    """An HF causal language model as functions of its parameters.

    Args:
        model: an HF `PreTrainedModel` with a head; on the CPU or on meta.
        platform: "cpu" or "tpu".
        placement: `sharding.Placement`, where arrays live; the default is one device.
        products: dtype of the linear layers' operands, see `bridge.Functional`; None computes in the weights' dtype.

    Raises:
        NotImplementedError: the architecture cannot keep a position-addressed KV cache; names the reason.
    """

    def __init__(self, model, platform, placement=Placement(), products=None):  # noqa: B008 (frozen)
        _refuse_unsupported(model)
        self.skeleton = _skeleton_of(model)
        self.run = bridge.functionalize(self.skeleton, platform, products)
        self.placement = placement
        self.is_streamed = model.device.type == "meta"
        self.config = self.skeleton.config.get_text_config(decoder=True)
        self.dtype = bridge.jax_dtype(model.dtype)
        self.num_layers = self.config.num_hidden_layers
        self.vocab_size = self.skeleton.get_input_embeddings().weight.shape[0]
        self.max_positions = getattr(self.config, "max_position_embeddings", None)
        self._cache_keyword = _cache_keyword(_decoder(self.skeleton))
        self.layout, self.hidden_size, self.head_size = self._probe()

    def embed(self, params, ids):
        """[batch, width] ids -> [batch, width, hidden] raw rows of the input embedding."""
        ids = self.placement.constrain(ids, "data", None)
        return self.run(params, lambda model, ids: torch.nn.functional.embedding(
            ids, model.get_input_embeddings().weight), ids)

    def forward(self, params, ids, view, taps=()):
        """Run the decoder on `ids` [batch, width] at `view.positions`, reading and writing `view.cache`.

        Args:
            taps: target layers whose outputs make the context feature (`hidden_states[i + 1]` of HF).
        """
        ids, positions = (self.placement.constrain(x, "data", None) for x in (ids, view.positions))
        if self.max_positions is not None:  # padding may lie past the position table; its rows are never read
            positions = jnp.minimum(positions, self.max_positions - 1)

        def body(model, ids, positions):
            output = _decoder(model)(
                input_ids=ids,
                position_ids=positions,
                use_cache=True,
                output_hidden_states=[tap + 1 for tap in taps] or False,
                return_dict=True,
                **{self._cache_keyword: LentCache(view, self.num_layers)},
            )
            tapped = [output.hidden_states[tap + 1] for tap in taps]
            return output.last_hidden_state, torch.cat(tapped, dim=-1) if tapped else None

        with jax.named_scope("target"), attention.lending(view):
            hidden, feature = self.run(params, body, ids, positions)
        # Fixed here, or XLA would split the residual stream the way the draft's projection reads it.
        hidden = self.placement.constrain(hidden, "data", None, None)
        feature = None if feature is None else self.placement.constrain(feature, "data", None, None)
        return TargetOutput(hidden, feature, view.cache)

    def head(self, params, hidden):
        """[..., hidden] last hidden states -> [..., vocab] float32 logits, through HF's own code after the decoder
        (scaling, soft-capping and bias included)."""

        def body(model, hidden):
            with _decoder_returns(model, hidden):
                return model(inputs_embeds=hidden, use_cache=False, return_dict=True).logits

        with jax.named_scope("head"):
            return self.run(params, body, hidden).astype(jnp.float32)

    def unembed(self, params, hidden):
        """[..., hidden] draft hidden states -> [..., vocab] through the bare output embedding."""
        with jax.named_scope("unembed"):
            return self.run(params, lambda model, hidden: model.get_output_embeddings()(hidden), hidden)

    def head_rows(self, params, ids):
        """The tensors of the output embedding cut to rows `ids` int32 [n]: name -> array, to put over `params`.

        `head` and `unembed` on the result give the logits of those ids only, in that order, through HF's own code. Nothing
        else may read it: with tied weights the input embedding is cut as well.
        """
        owned = {id(tensor) for tensor in self.skeleton.get_output_embeddings().parameters()}
        names = {self.run.aliases.get(name, name)
                 for name, tensor in self.skeleton.named_parameters(remove_duplicate=False) if id(tensor) in owned}
        cut = lambda tensors: {name: jnp.take(tensor, ids, axis=0) for name, tensor in tensors.items()}
        tensors = {name: params[name] for name in names}
        abstract = any(isinstance(tensor, jax.ShapeDtypeStruct) for tensor in tensors.values())
        return jax.eval_shape(cut, tensors) if abstract else cut(tensors)

    def _probe(self):
        """Trace one token abstractly: (cache layout per layer, hidden size, width of the logits)."""
        recorder = _LayoutRecorder()

        def trace(params):
            zeros = jnp.zeros((1, 1), jnp.int32)
            view = attention.AttentionView(recorder, zeros[0], zeros)
            hidden = self.forward(params, zeros, view).hidden
            recorder.attended = list(view.calls)
            return self.head(params, hidden), hidden

        name = type(self.skeleton).__name__
        try:
            logits, hidden = jax.eval_shape(trace, bridge.params_of(self.skeleton))
        except Exception as error:
            raise NotImplementedError(
                f"target: {name} cannot be lowered to XLA: {type(error).__name__}: {error}. "
                f"Use it with HF's own generate, or a model whose layers are plain attention."
            ) from error
        expected = list(range(self.num_layers))
        if sorted(recorder.layers) != expected or recorder.attended != expected:
            raise NotImplementedError(
                f"target: {name} has {self.num_layers} layers, but attention with its own KV cache ran in layers "
                f"{recorder.attended} (written: {sorted(recorder.layers)}). Recurrent, hybrid and KV-sharing layers "
                f"cannot be rolled back by position; use HF's own generate for this model."
            )
        return tuple(recorder.layers[layer] for layer in expected), hidden.shape[-1], logits.shape[-1]


class _LayoutRecorder:
    """Stands in for a cache during the probe: remembers what each layer would store."""

    def __init__(self):
        self.layers, self.attended = {}, []

    def attend(self, layer, query, key, value, starts, positions, last_visible, **options):
        self.layers[layer] = ((key.shape[1], key.shape[3]), (value.shape[1], value.shape[3]), key.dtype)
        return attention.attend(query, key, value, positions, last_visible, **options), self


def _refuse_unsupported(model):
    name = type(model).__name__
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "generate"):
        raise TypeError(f"model: expected a Hugging Face model with generate(), got {name}")
    text = config.get_text_config(decoder=True)
    reasons = {
        "is an encoder-decoder model": config.is_encoder_decoder,
        "keeps recurrent state, which cannot be rolled back to the accepted length": getattr(model, "_is_stateful", False),
        "does not route attention through AttentionInterface": not getattr(model, "_supports_attention_backend", False),
        "has no output embedding": model.get_output_embeddings() is None,
        "attends in chunks (attention_chunk_size)": getattr(text, "attention_chunk_size", None) is not None
        and "chunked_attention" in (getattr(text, "layer_types", None) or ()),
        "shares KV between layers (num_kv_shared_layers)": getattr(text, "num_kv_shared_layers", 0),
        "uses rope_type='dynamic', whose frequencies depend on the length": _rope_is_dynamic(text),
        "is quantized": getattr(model, "is_quantized", False) and getattr(model, "hf_quantizer", None) is not None
        and any(not p.is_floating_point() for p in model.parameters()),
    }
    for reason, holds in reasons.items():
        if holds:
            raise NotImplementedError(
                f"target: {name} {reason}. dflash_torchax serves decoder-only attention models; "
                f"use HF's own generate for this one."
            )


def _rope_is_dynamic(config):
    rope = getattr(config, "rope_parameters", None) or {}
    return "dynamic" in [rope.get("rope_type"), *(r.get("rope_type") for r in rope.values() if isinstance(r, dict))]


def _skeleton_of(model):
    """A deep copy of the module tree on the meta device, attending through this package."""
    # An enabled model's generate belongs to another engine; load_target's arrays would be copied on the device.
    left_out = ("generate", PARAMS_ATTRIBUTE)
    memo = {id(model.__dict__[name]): None for name in left_out if name in model.__dict__}
    for tensor in (*model.parameters(), *model.buffers()):
        meta = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = torch.nn.Parameter(meta, False) if isinstance(tensor, torch.nn.Parameter) else meta
    skeleton = copy.deepcopy(model, memo).eval()
    for name in left_out:
        skeleton.__dict__.pop(name, None)
    skeleton.set_attn_implementation(attention.IMPLEMENTATION)
    return skeleton


def _decoder(model):
    return model.base_model


def _cache_keyword(decoder):
    """transformers renamed `past_key_values` to `cache` in 5.2x: ask the forward which one it takes."""
    names = inspect.signature(decoder.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


@contextlib.contextmanager
def _decoder_returns(model, hidden):
    """Inside, the model's decoder returns `hidden`: HF's forward then is exactly its head."""
    decoder = _decoder(model)
    decoder.forward = lambda *args, **kwargs: BaseModelOutputWithPast(last_hidden_state=hidden)
    try:
        yield
    finally:
        del decoder.forward
