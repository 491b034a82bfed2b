"""The caches of a finished call, handed back to the user and into the next call: multi-turn without reading twice."""

import numpy as np
from transformers import Cache


class GenerationCache(Cache):
    """`output.cache` of an enabled model's generate; pass it as `cache=` with the longer prompt.

    Immutable: it may serve several continuations. Slots below `lengths - 1` hold history, so of a new prompt only what
    follows the common prefix is read.

    Args:
        caches: (target cache, draft cache) on the device.
        tokens: int [batch, slots], `lengths`: int [batch], what they hold, on the host.
        owner: the engine they belong to: weights, draft and cache layout.
    """

    def __init__(self, caches, tokens, lengths, owner):
        super().__init__(layers=[])
        self.caches, self.tokens, self.lengths, self.owner = caches, tokens, lengths, owner

    @classmethod
    def of(cls, state, tokens, lengths, owner):
        """From a finished state and host copies of its tokens and lengths."""
        return cls((state.target_cache, state.draft_cache), tokens, lengths, owner)

    def update(self, *args, **kwargs):
        raise TypeError("cache: it belongs to an enabled model's generate; HF's own generate cannot read it. Leave cache out.")

    @property
    def slots(self):
        return self.tokens.shape[1]

    def get_seq_length(self, layer_idx=0):
        """Longest history, in tokens."""
        return int(self.lengths.max()) - 1

    def get_max_length(self, layer_idx=0):
        return self.slots

    def check_owner(self, engine):
        """Raise ValueError where another engine made this cache: its weights, draft or layout differ."""
        if self.owner is not engine:
            raise ValueError("cache: it comes from another model, another draft or an earlier enable(); what it holds does not "
                             "fit. Leave cache out, and pass on the cache of this call's output.")

    def known(self, request):
        """int [batch]: leading tokens of each of the request's prompts that are in the caches.

        Raises:
            ValueError: the batch has another size.
        """
        if len(request.lengths) != len(self.lengths):
            raise ValueError(f"cache: holds {len(self.lengths)} rows, but input_ids has {len(request.lengths)}; "
                             f"continue the same batch, or leave cache out.")
        width = min(self.slots, request.prompt.shape[1])
        # The anchor is in no cache, and at least one token must be read for its logits.
        valid = np.minimum(self.lengths, request.lengths) - 1
        differs = self.tokens[:, :width] != request.prompt[:, :width]
        differs |= np.arange(width) >= valid[:, None]
        return np.where(differs.any(1), differs.argmax(1), valid)
