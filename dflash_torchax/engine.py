"""Compiled programs around `decode.Decoder`: buckets, compilation, running, counting."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import bridge
from .decode import Decoder, Params
from .eagle3 import Eagle3
from .loading import PARAMS_ATTRIBUTE
from .paged import cache_for
from .proposers import Autoregressive, DFlash
from .sharding import Placement, place_on, reshard
from .state import DecodeStats
from .target import Target
from .user_cache import use_compilation_cache

_MIN_PROMPT_BUCKET = 32
_MIN_SLOTS = 256
_MIN_EOS = 8


class Committed(NamedTuple):
    """What one step committed: tokens int32 [batch, block_size] (the first counts[b] are valid), counts, finished."""

    tokens: object
    counts: object
    finished: object


class Request(NamedTuple):
    """A batch on the host: right-padded prompts int32 [batch, width], their lengths, total length limits, eos ids."""

    prompt: np.ndarray
    lengths: np.ndarray
    limits: np.ndarray
    eos_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Generation:
    """tokens int32 [batch, slots] and lengths int32 [batch] on the host, and the call's stats."""

    tokens: np.ndarray
    lengths: np.ndarray
    stats: DecodeStats


class Engine:
    """One enabled model: its target and proposer, their weights on the device, and the compiled programs.

    Args:
        model: HF model.
        draft: `DFlashDraftModel`, any `proposers.Proposer`, or None for plain decoding.
        block_size: at most the draft's; None takes it.
        max_length: longest prompt + output to provide for; None sizes the caches by request.
        cache: the target's, "auto", "paged", "static" or a `paged.PagedCache`.
        mesh: `jax.sharding.Mesh` to run on, or None for one device.

    Raises:
        ValueError, TypeError, NotImplementedError: model, draft or block_size do not fit; nothing was changed.
    """

    def __init__(self, model, draft=None, *, block_size=None, max_length=None, cache="auto", mesh=None):
        use_compilation_cache()
        placement = Placement.of(mesh)
        target = Target(model, placement.platform, placement)
        self.max_length = _checked_max_length(max_length, target.max_positions)
        proposer = _proposer_for(draft, target, block_size)
        self.decoder = Decoder(target, proposer, cache_for(cache, target))
        place = None if mesh is None else place_on(placement, target.config)
        target_params = getattr(model, PARAMS_ATTRIBUTE, None) or bridge.params_of(model, place=place)
        self.params = Params(reshard(target_params, placement, target.config), proposer.params)
        self.prefill = jax.jit(self.decoder.prefill, static_argnames="slots")
        self.decode_loop = jax.jit(self.decoder.decode_loop, donate_argnums=1)
        self.stream_step = jax.jit(self._stream_step, donate_argnums=1)

    @property
    def block_size(self):
        return self.decoder.proposer.block_size

    def run(self, request):
        """Generate to the end in one compiled loop; the host reads once, after it."""
        state = self.decode_loop(self.params, self.start(request))
        return self.finish(state, len(request.lengths))

    def stream(self, request):
        """Yield `Committed` (on the host) after the prefill and after every step; the last value is a `Generation`."""
        state = self.start(request)
        rows = len(request.lengths)
        first, finished = jax.device_get((state.tokens[:rows], state.finished[:rows]))
        yield Committed(np.take_along_axis(first, request.lengths[:, None], axis=1), np.ones_like(request.lengths), finished)
        while not finished.all():
            state, committed = self.stream_step(self.params, state)
            committed = jax.tree.map(lambda x: x[:rows], jax.device_get(committed))
            finished = committed.finished
            yield committed
        yield self.finish(state, rows)

    def start(self, request):
        """Run the prefill: the state after each row's first token."""
        request = self._filled_up(request)
        slots = self.slots_for(request)
        self.decoder.cache.check_room(request.limits, slots, self.decoder.target.placement.num_data)
        width = bucket(request.prompt.shape[1], _MIN_PROMPT_BUCKET)
        prompt = np.pad(request.prompt, ((0, 0), (0, width - request.prompt.shape[1])))
        eos = np.full(bucket(len(request.eos_ids), _MIN_EOS), -1, np.int32)
        eos[: len(request.eos_ids)] = request.eos_ids
        arrays = (prompt, request.lengths, request.limits, eos)
        return self.prefill(self.params, *jax.device_put(tuple(np.asarray(a, np.int32) for a in arrays)), slots=slots)

    def slots_for(self, request):
        """Cache length of a request: a power of two that holds the longest row and one block beyond it."""
        longest = int(request.limits.max()) if self.max_length is None else self.max_length
        widest = bucket(request.prompt.shape[1], _MIN_PROMPT_BUCKET)
        return bucket(max(longest + self.block_size, widest), _MIN_SLOTS)

    def finish(self, state, rows):
        """Read the first `rows` rows of a finished state back to the host."""
        counts = (state.num_steps, state.num_drafted, state.accepted_per_step)
        tokens, lengths, counts = jax.tree.map(lambda x: x[:rows], jax.device_get((state.tokens, state.lengths, counts)))
        return Generation(tokens, lengths, DecodeStats.from_counts(*counts, self.block_size))

    def _filled_up(self, request):
        """The request with rows of one token, finished from the start, so that rows divide over a mesh's data axes."""
        extra = -len(request.lengths) % self.decoder.target.placement.num_data
        if not extra:
            return request
        one = np.ones(extra, np.int32)
        prompt = np.pad(request.prompt, ((0, extra), (0, 0)))
        return request._replace(
            prompt=prompt, lengths=np.concatenate([request.lengths, one]), limits=np.concatenate([request.limits, one])
        )

    def _stream_step(self, params, state):
        after = self.decoder.step(params, state)
        index = state.lengths[:, None] + jnp.arange(self.block_size, dtype=jnp.int32)
        tokens = jnp.take_along_axis(after.tokens, index, axis=1)
        return after, Committed(tokens, after.lengths - state.lengths, after.finished)


def bucket(size, smallest):
    """The smallest power of two >= size, at least `smallest`."""
    return max(smallest, 1 << (int(size) - 1).bit_length()) if size > 0 else smallest


def _checked_max_length(max_length, max_positions):
    if max_length is None:
        return None
    if not isinstance(max_length, int) or max_length < 2:
        raise ValueError(f"max_length: {max_length!r}; give the longest prompt + output in tokens, an integer of at least 2.")
    if max_positions is not None and max_length > max_positions:
        raise ValueError(f"max_length: {max_length} is beyond the model's {max_positions} positions (max_position_embeddings).")
    return max_length


def _proposer_for(draft, target, block_size):
    if block_size is not None and (not isinstance(block_size, int) or block_size < 1):
        raise ValueError(f"block_size: {block_size!r}; give an integer of at least 1 (the anchor and the drafted tokens).")
    if draft is None:
        if block_size not in (None, 1):
            raise ValueError(f"block_size: {block_size} without a draft; pass draft=load_draft(...), or leave block_size out.")
        return Autoregressive()
    if hasattr(draft, "propose") and hasattr(draft, "inject"):
        return draft
    if hasattr(draft, "denoise") and hasattr(draft, "inject_context"):
        return DFlash(draft, target, block_size)
    if hasattr(draft, "fuse") and hasattr(draft, "advance"):
        return Eagle3(draft, target, block_size)
    raise TypeError(f"draft: expected the result of load_draft(...), got {type(draft).__name__}")
