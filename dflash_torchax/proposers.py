"""Proposers: what drafts the tokens of a block. All share the target, the loop and the acceptance."""

import dataclasses
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from . import bridge, processors
from .cache import StaticKV
from .sampling import greedy, prefix_of, sample_draft
from .sharding import reshard


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Proposal:
    """tokens int32 [batch, block_size - 1], the proposer's cache after drafting, and, where the tokens are samples,
    the processed float32 logits [batch, block_size - 1, vocab] they were drawn from."""

    tokens: jax.Array
    cache: object
    logits: jax.Array | None = None


class Proposer(Protocol):
    """What `decode.Decoder` asks of a proposer. All methods are pure and run inside the compiled step.

    Fields:
        block_size: anchor and drafted tokens; block_size - 1 are drafted.
        taps: target layers whose outputs `inject` reads; () for none.
        params: the proposer's own parameters, a pytree passed to each method.

    A proposer whose `propose` can sample says `draft_sampling = "probabilistic"`, its default; others propose their argmax.
    """

    block_size: int
    taps: tuple[int, ...]
    params: object

    def create_cache(self, batch_size, slots): ...

    def inject(self, params, cache, feature, starts, positions):
        """Take in the context feature [batch, width, taps * hidden] of slots `starts ..`; rejected rows lie
        beyond the clock and are overwritten by the next call."""

    def propose(self, params, target_params, state): ...


def propose_from(logits, state, cache, ids=None, vocab_size=None):
    """A `Proposal` from a draft's logits [batch, block_size - 1, vocab], as the call's rules ask for it.

    What penalises or forbids words for the target does so here too, with the committed text as the prefix.
    Logits of some `ids` of the vocabulary only become those of all `vocab_size`, the others at -inf, where rules read them.
    """
    rules, width = state.rules, logits.shape[1]
    if ids is not None and not rules.samples_drafts and not rules.processors:
        return Proposal(ids[greedy(logits)], cache)
    if ids is not None:
        logits = jnp.full((*logits.shape[:-1], vocab_size), -jnp.inf, logits.dtype).at[..., ids].set(logits)
    prefix = prefix_of(state, state.tokens, width)
    if rules.samples_drafts:
        tokens, logits = sample_draft(rules, logits, prefix)
        return Proposal(tokens, cache, logits)
    committed = dataclasses.replace(prefix, lengths=jnp.broadcast_to(state.lengths[:, None], prefix.lengths.shape))
    return Proposal(greedy(processors.apply(processors.for_draft(rules.processors), logits, committed)), cache)


class Autoregressive:
    """Drafts nothing: a step is one plain decoding step. The baseline of every comparison."""

    block_size = 1
    taps = ()
    params = ()

    def create_cache(self, batch_size, slots):
        return ()

    def inject(self, params, cache, feature, starts, positions):
        return cache

    def propose(self, params, target_params, state):
        return Proposal(jnp.zeros((state.lengths.shape[0], 0), jnp.int32), state.draft_cache)


class DraftParams(NamedTuple):
    """A DFlash draft's own tensors, and what replaces the target's for its logits: the rows of its vocabulary, or nothing."""

    draft: dict
    head: dict


class DFlash:
    """Block-diffusion drafting: one forward of the draft proposes the whole block.

    Args:
        draft: `DFlashDraftModel`.
        target: `target.Target`, whose embedding and output embedding the draft uses.
        block_size: at most the trained one; None takes it.
        target_params: the target's weights, read once where the draft has a vocabulary of its own.
        params: another `DFlash`'s of the same draft, to share them.

    Raises:
        ValueError: the draft does not fit the target or the block size is out of range.
    """

    draft_sampling = "probabilistic"

    def __init__(self, draft, target, block_size=None, *, target_params=None, params=None):
        config = draft.config
        config.check_fits(target)
        trained = config.block_size
        self.block_size = trained if block_size is None else block_size
        if not 1 <= self.block_size <= trained:
            raise ValueError(f"block_size: {block_size} is outside 1..{trained}; this draft was trained for blocks of {trained}.")
        self.target = target
        self.config = config
        self.taps = config.target_layer_ids
        self.run = bridge.functionalize(draft, target.run.platform)
        self.params = params or self._params(draft, target_params)

    def _params(self, draft, target_params):
        target = self.target
        tensors = reshard(bridge.params_of(draft, dtype=target.dtype), target.placement, self.config.backbone)
        if draft.vocabulary is None:
            return DraftParams(tensors, {})
        rows = target.head_rows(target_params, tensors["vocabulary"])
        return DraftParams(tensors, reshard(rows, target.placement, target.config))

    @property
    def layout(self):
        """Per layer what `StaticKV.create` takes."""
        backbone = self.config.backbone
        head = (backbone.num_key_value_heads, backbone.head_dim)
        return ((head, head, self.target.dtype),) * backbone.num_hidden_layers

    def create_cache(self, batch_size, slots):
        return StaticKV.create(self.layout, batch_size, slots, self.target.placement)

    def inject(self, params, cache, feature, starts, positions):
        with jax.named_scope("inject_context"):
            pairs = self.run(params.draft, lambda draft, *args: draft.inject_context(*args), feature, positions)
        for layer, (key, value) in enumerate(pairs):
            cache = cache.write(layer, key, value, starts)
        return cache

    def propose(self, params, target_params, state):
        if self.block_size == 1:  # nothing to draft; the context is kept for wider steps
            return Autoregressive.propose(self, params, target_params, state)
        hidden, cache = self.denoise(params, target_params, state)
        logits = self.logits(params, target_params, hidden[:, 1:])
        return propose_from(logits, state, cache, params.draft.get("vocabulary"), self.target.head_size)

    def logits(self, params, target_params, hidden):
        """Float32 logits [..., n] over the draft's vocabulary, which is the target's unless it has its own."""
        logits = self.target.unembed({**target_params, **params.head}, hidden)
        return self.run(params.draft, lambda draft, logits: draft.finish_logits(logits), logits).astype(jnp.float32)

    def denoise(self, params, target_params, state):
        """The draft's hidden states [batch, block_size, hidden] of the next block, and its cache.

        The block's own K/V go through the cache at the slots that `inject` overwrites after verification. Slots at
        or past a row's limit do not exist: no query sees them.
        """
        batch_size = state.lengths.shape[0]
        masks = jnp.full((batch_size, self.block_size - 1), self.config.mask_token_id, jnp.int32)
        block = jnp.concatenate([state.anchors[:, None], masks], axis=1)
        positions = state.positions(self.block_size)
        last = jnp.minimum(state.starts + self.block_size, state.limits) - 1
        cache = state.draft_cache

        def attend(module, query, key, value):
            nonlocal cache
            query, key, value = bridge.jax_view((query, key, value))
            out, cache = cache.attend(
                module.layer_idx, query, key, value, state.starts, positions, None if module.is_causal else last,
                scaling=module.head_dim**-0.5, window=module.sliding_window, symmetric=not module.is_causal,
            )
            return bridge.torch_view(out)

        with jax.named_scope("draft"):
            embedded = self.target.embed(target_params, block) * self.config.input_embedding_scale
            hidden = self.run(params.draft, lambda draft, *args: draft.denoise(*args, attend), embedded, positions)
        return hidden, cache
