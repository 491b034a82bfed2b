"""EAGLE-3 behind the proposer protocol: autoregressive drafting inside the compiled step, and loading its checkpoints.

Slot s pairs the target's hidden state at s with the token at s + 1, which verification does not know yet. So `inject`
only keeps the fused features, and `propose` first runs the slots committed since, then drafts. Like everything else, what
has been run is bounded by the clock: `inject` at a slot takes back whatever was run from it on.
"""

import dataclasses

import jax
import jax.numpy as jnp
import torch
from accelerate import init_empty_weights
from safetensors.torch import load_file

from . import bridge
from .cache import StaticKV, write_rows
from .eagle3_model import Eagle3Config, Eagle3DraftModel
from .proposers import Proposal
from .sampling import greedy

# Slots of a prompt run at once before the first draft; a step itself adds at most a block.
_CATCH_UP = 32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Eagle3Cache:
    """The layer's K/V, the fused feature of every slot [batch, slots, hidden], and slots already run int32 [batch]."""

    kv: StaticKV
    fused: jax.Array
    done: jax.Array

    def grow(self, slots):
        """The same history in `slots` slots, when there are fewer."""
        extra = max(slots - self.fused.shape[1], 0)
        fused = jnp.pad(self.fused, ((0, 0), (0, extra), (0, 0)))
        return dataclasses.replace(self, kv=self.kv.grow(slots), fused=fused)

    def trim(self, ends):
        """Only the first `ends[b]` tokens are known to stay: the last slot was run with a token that may be another now."""
        return dataclasses.replace(self, done=jnp.minimum(self.done, jnp.maximum(ends - 1, 0)))


class Eagle3:
    """Drafts block_size - 1 tokens one after the other with one small layer.

    Args:
        draft: `Eagle3DraftModel`.
        target: `target.Target`.
        block_size: anchor and drafted tokens; None takes the checkpoint's.

    Raises:
        ValueError: the draft does not fit the target.
    """

    def __init__(self, draft, target, block_size=None):
        draft.config.check_fits(target)
        self.block_size = draft.config.block_size if block_size is None else block_size
        self.target, self.config = target, draft.config
        self.taps = draft.config.taps_for(target.num_layers)
        self.run = bridge.functionalize(draft, target.run.platform)
        self.params = bridge.params_of(draft, dtype=target.dtype)

    def create_cache(self, batch_size, slots):
        backbone, target = self.config.backbone, self.target
        head_dim = getattr(backbone, "head_dim", None) or backbone.hidden_size // backbone.num_attention_heads
        head = (backbone.num_key_value_heads, head_dim)
        fused = jnp.zeros((batch_size, slots, backbone.hidden_size), target.dtype)
        return Eagle3Cache(
            StaticKV.create([(head, head, target.dtype)], batch_size, slots, target.placement),
            target.placement.constrain(fused, "data", None, None),
            jnp.zeros((batch_size,), jnp.int32),
        )

    def inject(self, params, cache, feature, starts, positions):
        with jax.named_scope("fuse"):
            fused = self.run(params, lambda draft, feature: draft.fuse(feature), feature)
        return Eagle3Cache(cache.kv, write_rows(cache.fused, fused, starts, axis=0), jnp.minimum(cache.done, starts))

    def propose(self, params, target_params, state):
        cache, width, anchors = state.draft_cache, self.block_size, state.starts
        if state.rules.samples_drafts:
            raise NotImplementedError("draft_sampling: 'probabilistic' is for DFlash drafts; use 'greedy' with EAGLE-3: its output "
                                      "follows the target's distribution as well.")
        if width == 1:
            return Proposal(jnp.zeros((anchors.shape[0], 0), jnp.int32), cache)

        slots = min(cache.fused.shape[1], state.tokens.shape[1] - 1)

        def run_slots(cache, starts, count):
            """The layer over `count` slots from `starts` on, each with the committed token behind it."""
            index = starts[:, None] + jnp.arange(count, dtype=jnp.int32)
            ids = jnp.take_along_axis(state.tokens, index + 1, axis=1)
            fused = jnp.take_along_axis(cache.fused, index[..., None], axis=1)
            hidden, kv = self._advance(params, target_params, cache.kv, ids, fused, index)
            return hidden, dataclasses.replace(cache, kv=kv)

        def catch_up(cache):
            many = min(max(_CATCH_UP, width), slots)
            starts = jnp.minimum(cache.done, slots - many)  # slots run twice come out the same
            done = jnp.maximum(cache.done, jnp.minimum(starts + many, anchors - width))
            return dataclasses.replace(run_slots(cache, starts, many)[1], done=done)

        # A prompt is many slots, a step at most one block: only the last pass is always needed.
        cache = jax.lax.while_loop(lambda cache: (cache.done < anchors - width).any(), catch_up, cache)
        hidden, cache = run_slots(cache, cache.done, width)
        last = jnp.clip(anchors - 1 - cache.done, 0, width - 1)
        hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)

        def draft_one(carry, offset):
            kv, hidden, token = carry
            hidden, kv = self._advance(params, target_params, kv, token, hidden, (anchors + offset)[:, None])
            token = self._token(params, hidden)
            return (kv, hidden, token), token[:, 0]

        first = self._token(params, hidden)
        (kv, _, _), rest = jax.lax.scan(draft_one, (cache.kv, hidden, first), jnp.arange(width - 2, dtype=jnp.int32))
        tokens = jnp.concatenate([first, rest.T], axis=1)
        return Proposal(tokens, dataclasses.replace(cache, kv=kv, done=jnp.maximum(anchors, cache.done)))

    def _advance(self, params, target_params, kv, ids, hidden, positions):
        """The layer over [batch, width] ids and hidden states at `positions`: (hidden, written K/V)."""
        cache = kv

        def attend(module, query, key, value):
            nonlocal cache
            query, key, value = bridge.jax_view((query, key, value))
            out, cache = cache.attend(0, query, key, value, positions[:, 0], positions, None, scaling=module.head_dim**-0.5)
            return bridge.torch_view(out)

        with jax.named_scope("draft"):
            embedded = embed(self.run, self.target, self.config, params, target_params, ids)
            hidden = self.run(params, lambda draft, *args: draft.advance(*args, attend), embedded, hidden, positions)
        return hidden, cache

    def _token(self, params, hidden):
        """[batch, 1, hidden] -> int32 [batch, 1] target ids: the head's choice, mapped by d2t."""
        chosen = greedy(self.run(params, lambda draft, hidden: draft.logits(hidden), hidden))
        return chosen + params["d2t"][chosen]


def embed(run, target, config, params, target_params, ids):
    """Input embeddings of `ids`: the draft's own where the checkpoint brings them, else the target's."""
    if not config.own_embedding:
        return target.embed(target_params, ids)
    return run(params, lambda draft, ids: draft.embed_tokens(ids), ids)


def read_eagle3(folder, fields, dtype=None):
    """An EAGLE-3 checkpoint (SafeAILab's, vLLM's or speculators' layout) as `Eagle3DraftModel` on the CPU.

    Args:
        folder: folder with config.json and weights, safetensors or pytorch_model.bin.
        fields: the parsed config.json.
        dtype: torch dtype of the weights; None keeps the checkpoint's.

    Raises:
        FileNotFoundError, ValueError: as `load_draft`.
    """
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin")):
        part = load_file(file) if file.suffix == ".safetensors" else torch.load(file, map_location="cpu", weights_only=True)
        tensors |= {_own_name(name): tensor for name, tensor in part.items()}
    if not tensors:
        raise FileNotFoundError(f"path_or_repo: {folder} has neither .safetensors nor pytorch_model.bin")
    tensors.pop("t2d", None)  # says the same as d2t
    config = Eagle3Config.from_dict(fields, fc_bias="fc.bias" in tensors, own_embedding="embed_tokens.weight" in tensors)
    if "lm_head.weight" not in tensors:
        raise ValueError(f"lm_head.weight: missing from {folder}; an EAGLE-3 draft has its own head.")
    if "d2t" not in tensors and config.draft_vocab_size == config.backbone.vocab_size:
        tensors["d2t"] = torch.zeros(config.draft_vocab_size, dtype=torch.long)
    with init_empty_weights(include_buffers=False):
        draft = Eagle3DraftModel(config)
    expected = {name: tuple(t.shape) for name, t in (*draft.named_parameters(), ("d2t", draft.d2t))}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted({*expected, *found}):
        if expected.get(name) != found.get(name):
            raise ValueError(f"{name}: {found.get(name, 'missing')} in {folder}, but the config asks for "
                             f"{expected.get(name, 'none')}. Check that config.json belongs to these weights.")
        if not torch.isfinite(tensors[name]).all():
            raise ValueError(f"{name}: NaN or infinity in {folder}; the checkpoint is damaged, fetch or save it again.")
    draft.d2t = tensors.pop("d2t").long()
    for name, tensor in tensors.items():
        owner, _, leaf = name.rpartition(".")
        setattr(draft.get_submodule(owner), leaf, torch.nn.Parameter(tensor if dtype is None else tensor.to(dtype), False))
    return draft.eval()


def _own_name(name):
    """vLLM's and speculators' spellings -> SafeAILab's."""
    return name.removeprefix("model.").replace("layers.0.", "midlayer.")
