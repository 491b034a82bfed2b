"""Compiled programs around `decode.Decoder`: buckets, compilation, running, counting."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import bridge
from .cache_factory import cache_for
from .decode import Decoder, Params
from .eagle3 import Eagle3
from .loading import PARAMS_ATTRIBUTE
from .proposers import Autoregressive, DFlash
from .sampling import Rules, Verdict
from .session import GenerationCache
from .sharding import Placement, place_on, reshard
from .state import DecodeStats
from .target import Target
from .user_cache import use_compilation_cache

_MIN_PROMPT_BUCKET = 32
_MIN_RESUME_BUCKET = 8
_MIN_SLOTS = 256
_MIN_EOS = 8


class Committed(NamedTuple):
    """What one step committed: tokens int32 [batch, block_size] (the first counts[b] are valid), counts, finished."""

    tokens: object
    counts: object
    finished: object


class Request(NamedTuple):
    """A batch on the host.

    Fields:
        prompt, lengths: int32 [batch, width] right-padded, and each row's true length.
        limits: int32 [batch], total lengths not to exceed.
        eos_ids: ids that end a row.
        rules: `sampling.Rules` of numpy arrays; None is greedy.
        reuse: a `session.GenerationCache` whose common prefixes need not be read again, or None.
        keep_cache: whether the caches are wanted afterwards.
    """

    prompt: np.ndarray
    lengths: np.ndarray
    limits: np.ndarray
    eos_ids: tuple[int, ...]
    rules: Rules | None = None
    reuse: object = None
    keep_cache: bool = False


@dataclasses.dataclass(frozen=True)
class Generation:
    """tokens int32 [batch, slots] and lengths int32 [batch] on the host, the call's stats, and, where it was asked for,
    the caches as a `session.GenerationCache`."""

    tokens: np.ndarray
    lengths: np.ndarray
    stats: DecodeStats
    cache: object = None


class Engine:
    """One enabled model: its target and proposer, their weights on the device, and the compiled programs.

    Args:
        model: HF model, or an `Engine` whose target and weights this one shares.
        draft: `DFlashDraftModel`, any `proposers.Proposer`, or None for plain decoding.
        block_size: at most the draft's; None takes it.
        max_length: longest prompt + output to provide for; None sizes the caches by request.
        cache: the target's, "auto", "paged", "static" or a `PagedCache`.
        mesh: `jax.sharding.Mesh` to run on, or None for one device.
        draft_sampling: "greedy" or "probabilistic", see `sampling.Rules`; None takes the proposer's default.

    Raises:
        ValueError, TypeError, NotImplementedError: model, draft or block_size do not fit; nothing was changed.
    """

    def __init__(self, model, draft=None, *, block_size=None, max_length=None, cache="auto", mesh=None,
                 draft_sampling=None):
        if draft_sampling not in (None, "greedy", "probabilistic"):
            raise ValueError(f"draft_sampling: {draft_sampling!r}; choose 'greedy' (the draft's argmax, sampled by the target) "
                             f"or 'probabilistic' (the draft's own samples, by rejection).")
        use_compilation_cache()
        self.draft = draft
        self._options = {"block_size": block_size, "max_length": max_length, "cache": cache, "mesh": mesh,
                         "draft_sampling": draft_sampling}
        shared = isinstance(model, Engine)
        target, target_params = (model.decoder.target, model.params.target) if shared else _placed(model, mesh)
        self.max_length = _checked_max_length(max_length, target.max_positions)
        proposer = _proposer_for(draft, target, target_params, block_size)
        self.draft_sampling = draft_sampling or self._default_draft_sampling(proposer)
        self.decoder = Decoder(target, proposer, cache_for(cache, target))
        self.params = Params(target_params, proposer.params)
        decoder = self.decoder
        self.prefill = jax.jit(decoder.prefill, static_argnames=("slots", "keep_cache"))
        self.decode_loop = jax.jit(decoder.decode_loop, donate_argnums=1)
        self.stream_step = jax.jit(self._stream_step, donate_argnums=1)
        self.stop_rows = jax.jit(lambda state, rows: dataclasses.replace(state, finished=state.finished | rows), donate_argnums=0)
        # The halves of a prefill and of a step, for what happens on the host in between.
        self.read_prompt = jax.jit(decoder.read_prompt, static_argnames=("slots", "keep_cache"))
        self.resume_prompt = jax.jit(decoder.resume_prompt, static_argnames=("slots", "width"))
        self.first = jax.jit(decoder.first, donate_argnums=0)
        self.propose_and_verify = jax.jit(self._propose_and_verify, donate_argnums=1)
        self.commit = jax.jit(lambda state, *verdict: decoder.commit(state, Verdict(*verdict)), donate_argnums=0)

    def with_draft(self, draft):
        """The engine of the same model and options with another draft."""
        return type(self)(self, draft, **self._options)

    @staticmethod
    def _default_draft_sampling(proposer):
        return getattr(proposer, "draft_sampling", "greedy")

    @property
    def block_size(self):
        return self.decoder.proposer.block_size

    def run(self, request):
        """Generate to the end in one compiled loop; the host reads once, after it."""
        return self.finish(self.decode_loop(self.params, self.start(request)), request)

    def stream(self, request):
        """Yield `Committed` (on the host) after the prefill and after every step; the last value is a `Generation`.

        What is sent back, a bool [batch] or None, ends rows.
        """
        state = self.start(request)
        rows = len(request.lengths)
        first, finished = jax.device_get((state.tokens[:rows], state.finished[:rows]))
        committed = Committed(np.take_along_axis(first, request.lengths[:, None], axis=1), np.ones_like(request.lengths), finished)
        while True:
            stop = yield committed
            if stop is not None and stop.any():
                state = self.stop_rows(state, jax.device_put(np.pad(stop, (0, state.finished.shape[0] - rows))))
            if (committed.finished if stop is None else committed.finished | stop).all():
                break
            state, committed = self.stream_step(self.params, state)
            committed = jax.tree.map(lambda x: x[:rows], jax.device_get(committed))
        yield self.finish(state, request)

    def start(self, request):
        """Run the prefill: the state after each row's first token."""
        if request.reuse is not None:
            return self.first(*self.read(request))
        arrays, slots = self._inputs(request)
        return self.prefill(self.params, *arrays, slots=slots, keep_cache=request.keep_cache)

    def read(self, request):
        """Read the prompt only: (state, logits [batch, 1, vocab])."""
        arrays, slots = self._inputs(request)
        if request.reuse is None:
            return self.read_prompt(self.params, *arrays, slots=slots, keep_cache=request.keep_cache)
        known = request.reuse.known(request)
        width = bucket(int((request.lengths - known).max()), _MIN_RESUME_BUCKET)
        slots = max(slots, bucket(int(known.max()) + width, _MIN_SLOTS), request.reuse.slots)
        prompt = self._filled_up(request).prompt
        known = np.pad(known, (0, len(prompt) - len(known)))  # the kept caches have the rows that fill up, too
        prompt = np.pad(prompt, ((0, 0), (0, slots - prompt.shape[1])))
        arrays = jax.device_put((known.astype(np.int32), prompt.astype(np.int32))) + arrays[1:]
        return self.resume_prompt(self.params, request.reuse.caches, *arrays, slots=slots, width=width)

    def _inputs(self, request):
        """(the arrays of a prefill on the device, slots)."""
        request = self._filled_up(request)
        slots = self.slots_for(request)
        self.decoder.cache.check_room(request.limits, slots, self.decoder.target.placement.num_data)
        width = bucket(request.prompt.shape[1], _MIN_PROMPT_BUCKET)
        prompt = np.pad(request.prompt, ((0, 0), (0, width - request.prompt.shape[1])))
        eos = np.full(bucket(len(request.eos_ids), _MIN_EOS), -1, np.int32)
        eos[: len(request.eos_ids)] = request.eos_ids
        arrays = tuple(np.asarray(a, np.int32) for a in (prompt, request.lengths, request.limits, eos))
        return jax.device_put((*arrays, request.rules or host_rules(len(request.lengths)))), slots

    def slots_for(self, request):
        """Cache length of a request: a power of two that holds the longest row and one block beyond it."""
        longest = int(request.limits.max()) if self.max_length is None else self.max_length
        widest = bucket(request.prompt.shape[1], _MIN_PROMPT_BUCKET)
        return bucket(max(longest + self.block_size, widest), _MIN_SLOTS)

    def finish(self, state, request):
        """Read a finished state back to the host."""
        rows = len(request.lengths)
        counts = (state.num_steps, state.num_drafted, state.accepted_per_step)
        tokens, lengths, counts = jax.tree.map(lambda x: x[:rows], jax.device_get((state.tokens, state.lengths, counts)))
        cache = GenerationCache.of(state, tokens, lengths, self) if request.keep_cache else None
        return Generation(tokens, lengths, DecodeStats.from_counts(*counts, self.block_size, prefill_tokens(request)), cache)

    def _filled_up(self, request):
        """The request with rows of one token, finished from the start, so that rows divide over a mesh's data axes."""
        extra = -len(request.lengths) % self.decoder.target.placement.num_data
        if not extra:
            return request
        one = np.ones(extra, np.int32)
        prompt = np.pad(request.prompt, ((0, extra), (0, 0)))
        rules = request.rules and dataclasses.replace(request.rules, pads=np.pad(request.rules.pads, (0, extra)))
        return request._replace(
            prompt=prompt, rules=rules,
            lengths=np.concatenate([request.lengths, one]), limits=np.concatenate([request.limits, one]),
        )

    def _stream_step(self, params, state):
        after = self.decoder.step(params, state)
        index = state.lengths[:, None] + jnp.arange(self.block_size, dtype=jnp.int32)
        tokens = jnp.take_along_axis(after.tokens, index, axis=1)
        return after, Committed(tokens, after.lengths - state.lengths, after.finished)


    def _propose_and_verify(self, params, state, padded, pad_id):
        """The first half of a step: (state, drafted, logits); rows in `padded` draft pad_id, as HF feeds ended rows."""
        state, proposal = self.decoder.propose(params, state)
        drafted = jnp.where(padded[:, None], pad_id, proposal.tokens)
        state, logits = self.decoder.verify(params, state, drafted)
        return state, drafted, logits


def _placed(model, mesh):
    """(`Target`, its parameters on the device or mesh)."""
    placement = Placement.of(mesh)
    target = Target(model, placement.platform, placement)
    place = None if mesh is None else place_on(placement, target.config)
    params = getattr(model, PARAMS_ATTRIBUTE, None) or bridge.params_of(model, place=place)
    return target, reshard(params, placement, target.config)


def check_sampled(generation):
    """Raise RuntimeError, as torch.multinomial does, where the scores of a sampled token left nothing to choose from."""
    valid = np.arange(generation.tokens.shape[1]) < generation.lengths[:, None]
    if (generation.tokens[valid] < 0).any():
        raise RuntimeError("do_sample: the processed scores leave no token (all -inf, or NaN in the model's logits); "
                           "loosen the processors or check the weights.")


def prefill_tokens(request):
    """Prompt tokens that a request's prefill has to read."""
    known = 0 if request.reuse is None else request.reuse.known(request)
    return int((request.lengths - known).sum())


def host_rules(batch_size, processors=(), pads=None, pad_id=0, seed=(0, 0), **static):
    """`sampling.Rules` of numpy arrays."""
    pads = np.zeros(batch_size, np.int32) if pads is None else pads
    return Rules(tuple(processors), np.array(seed, np.uint32), pads, np.int32(pad_id), **static)


def bucket(size, smallest):
    """The smallest power of two >= size, at least `smallest`."""
    return max(smallest, 1 << (int(size) - 1).bit_length()) if size > 0 else smallest


def _checked_max_length(max_length, max_positions):
    if max_length is None:
        return None
    if type(max_length) is not int or max_length < 2:
        raise ValueError(f"max_length: {max_length!r}; give the longest prompt + output in tokens, an integer of at least 2.")
    if max_positions is not None and max_length > max_positions:
        raise ValueError(f"max_length: {max_length} is beyond the model's {max_positions} positions (max_position_embeddings).")
    return max_length


def _proposer_for(draft, target, target_params, block_size):
    if block_size is not None and (type(block_size) is not int or block_size < 1):
        raise ValueError(f"block_size: {block_size!r}; give an integer of at least 1 (the anchor and the drafted tokens).")
    if draft is None:
        if block_size not in (None, 1):
            raise ValueError(f"block_size: {block_size} without a draft; pass draft=load_draft(...), or leave block_size out.")
        return Autoregressive()
    if hasattr(draft, "propose") and hasattr(draft, "inject"):
        return draft
    if hasattr(draft, "denoise") and hasattr(draft, "inject_context"):
        return DFlash(draft, target, block_size, target_params=target_params)
    if hasattr(draft, "fuse") and hasattr(draft, "advance"):
        return Eagle3(draft, target, block_size)
    raise TypeError(f"draft: expected the result of load_draft(...), got {type(draft).__name__}")
