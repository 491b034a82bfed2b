"""What makes the target's cache for a call: contiguous or paged, and which of them a target can have."""

import dataclasses
import logging

import jax.numpy as jnp

from .cache import StaticKV
from .paged import PagedKV

logger = logging.getLogger(__name__)


def kernel_refusal(layout, num_model=1):
    """Why the Pallas kernel cannot serve a cache layout, or None; it needs TPU-tileable heads."""
    for (kv_heads, key_dim), value, dtype in layout:
        local = kv_heads // num_model if kv_heads % num_model == 0 else kv_heads
        if value != (kv_heads, key_dim):
            return f"keys of shape {(kv_heads, key_dim)} and values of {value}"
        if key_dim % 128:
            return f"head_dim {key_dim} is no multiple of 128"
        rows = 2 * local // (4 // jnp.dtype(dtype).itemsize)
        if rows not in (1, 2, 4) and rows % 8:
            return f"{local} kv heads of {jnp.dtype(dtype).name} on a device cannot be tiled"
    return None


@dataclasses.dataclass(frozen=True)
class StaticCache:
    """Makes the target a `StaticKV` of the request's size."""

    def create(self, target, batch_size, slots):
        return StaticKV.create(target.layout, batch_size, slots, target.placement)

    def check_room(self, limits, slots, num_data):
        """Nothing to check: every row has its slots."""


@dataclasses.dataclass(frozen=True)
class PagedCache:
    """Makes the target a `PagedKV`.

    Fields:
        page_size: tokens per page.
        num_pages: pages of the pool (of each data shard), one of them nobody's; None takes what the request needs.

    Raises:
        ValueError: a size is not a positive integer.
    """

    page_size: int = 32
    num_pages: int | None = None

    def __post_init__(self):
        if not isinstance(self.page_size, int) or self.page_size < 1:
            raise ValueError(
                f"page_size: {self.page_size!r}; give the tokens per page, an integer of at least 1 (16, 32 and 64 suit TPUs)."
            )
        if self.num_pages is not None and (not isinstance(self.num_pages, int) or self.num_pages < 2):
            raise ValueError(
                f"num_pages: {self.num_pages!r}; give at least 2 (one page belongs to no row), or None to size by request."
            )

    def create(self, target, batch_size, slots):
        placement = target.placement
        kernel = target.run.platform == "tpu" and kernel_refusal(target.layout, placement.num_model) is None
        return PagedKV.create(
            target.layout,
            batch_size,
            self._pages_for(slots),
            self.page_size,
            self.pool(batch_size, slots, placement.num_data),
            kernel,
            self.num_pages is not None,
            placement,
        )

    def pool(self, batch_size, slots, num_data=1):
        """Pages of one data shard's pool."""
        return self.num_pages or batch_size // num_data * self._pages_for(slots) + 1

    def check_room(self, limits, slots, num_data):
        """Raise ValueError where rows growing to `limits` (host int [batch]) could need more pages than there are."""
        have = self.pool(len(limits), slots, num_data) - 1
        for shard in range(num_data):
            rows = limits[shard * len(limits) // num_data : (shard + 1) * len(limits) // num_data]
            need = sum(self._pages_for(limit) for limit in rows)
            if need > have:
                raise ValueError(
                    f"num_pages: rows of up to {[int(n) for n in rows]} tokens can need {need} pages of {self.page_size} tokens, "
                    f"but the pool has {have} (num_pages={self.num_pages}, one of them nobody's). "
                    f"Pass num_pages={need + 1} or more, lower max_new_tokens, or send fewer rows at once."
                )

    def _pages_for(self, tokens):
        return -(-int(tokens) // self.page_size)


def cache_for(cache, target):
    """The cache factory that `enable(cache=...)` names.

    Raises:
        ValueError, TypeError: not "auto", "paged", "static" or a `PagedCache`; or a cache this target cannot have.
    """
    refusal = kernel_refusal(target.layout, target.placement.num_model)
    if cache == "auto":
        if target.run.platform != "tpu":
            return StaticCache()
        if refusal is not None:
            logger.info("cache: static, because the paged attention kernel cannot serve this model: %s", refusal)
        return PagedCache() if refusal is None else StaticCache()
    if cache == "static":
        return StaticCache()
    if cache == "paged" or isinstance(cache, PagedCache):
        if any(key != value for key, value, _ in target.layout):
            raise ValueError("cache: 'paged' needs keys and values of one shape in every layer; use cache='static' for this model.")
        return PagedCache() if cache == "paged" else cache
    raise ValueError(f"cache: {cache!r}; use 'auto', 'paged', 'static' or PagedCache(page_size=..., num_pages=...).")
