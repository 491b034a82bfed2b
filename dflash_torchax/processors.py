"""HF logits processors on the device: each position of a block is processed with exactly the prefix it would have had.

`translate` turns an HF processor object into a `Rule` (a kind and its values as arrays, so that another value compiles
nothing); what it does not know runs on the host, through HF's own object (`host_loop`).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers.generation import logits_process as hf

_NEVER = -jnp.inf


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rule:
    """One processor: `kind` is static, `values` are arrays."""

    values: tuple
    kind: str = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prefix:
    """What has been said before each position.

    Fields:
        tokens: int32 [batch, slots], committed and drafted tokens.
        lengths: int32 [batch, width], tokens that precede each position.
        pads: int32 [batch], left padding, which HF's rules take for text; pad_id: int32, its id.
    """

    tokens: jax.Array
    lengths: jax.Array
    pads: jax.Array
    pad_id: jax.Array

    @property
    def columns(self):
        """int32 [batch, width]: lengths as HF counts them, left padding included."""
        return self.lengths + self.pads[:, None]

    def padded(self, most):
        """(tokens, lengths) with up to `most` pads in front: all that a rule looking back `most` words can see."""
        count = jnp.minimum(self.pads, most)
        index = jnp.arange(self.tokens.shape[1] + most) - count[:, None]
        last = self.tokens.shape[1] - 1
        tokens = jnp.take_along_axis(self.tokens, jnp.clip(index, 0, last), axis=1)
        return jnp.where(index < 0, self.pad_id, tokens), self.lengths + count[:, None]


def apply(rules, logits, prefix):
    """Run rules in order on float32 logits [batch, width, vocab]."""
    with jax.named_scope("processors"):
        for rule in rules:
            logits = _APPLY[rule.kind](logits, prefix, *rule.values)
    return logits


def for_draft(rules):
    """The rules that make a draft's greedy guess better: what is forbidden or penalised for the target."""
    return tuple(rule for rule in rules if rule.kind in _HELPS_DRAFT)


def translate(processor, vocab_size, pads):
    """HF processor object -> `Rule`, or None when it has to run on the host; `pads` int [batch] is the left padding.

    Raises:
        ValueError: a sequence names a word beyond the vocabulary; HF refuses that too.
    """
    build = _TRANSLATE.get(type(processor))
    if build is _from_repetition and not _skips(processor.prompt_ignore_length, pads):
        return None
    rule = None if build is None else build(processor)
    if rule is not None and rule.kind == "sequence_bias" and rule.values[0].max() >= vocab_size:
        raise ValueError(f"sequence_bias / bad_words_ids: {int(rule.values[0].max())} is beyond the model's {vocab_size} words.")
    return rule


# ---- what each kind does ------------------------------------------------------------------------------------------


def _temperature(logits, prefix, temperature):
    return logits / temperature


def _top_k(logits, prefix, k):
    ordered = jnp.sort(logits, axis=-1)
    index = jnp.clip(logits.shape[-1] - k, 0, logits.shape[-1] - 1)
    return jnp.where(logits < jnp.take(ordered, index, axis=-1)[..., None], _NEVER, logits)


def _top_p(logits, prefix, p, keep):
    """Drop the smallest words whose summed probability stays within 1 - p; words tied at the border are kept."""
    ordered = jnp.sort(logits, axis=-1)
    removed = jnp.cumsum(jax.nn.softmax(ordered, axis=-1), axis=-1) <= 1 - p
    first_kept = jnp.minimum(removed.sum(-1), logits.shape[-1] - keep)
    return jnp.where(logits < jnp.take_along_axis(ordered, first_kept[..., None], axis=-1), _NEVER, logits)


def _min_p(logits, prefix, p, keep):
    probs = jax.nn.softmax(logits, axis=-1)
    return _keep_at_least(logits, probs >= p * probs.max(-1, keepdims=True), keep)


def _typical(logits, prefix, mass, keep):
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    probs = jnp.exp(log_probs)
    entropy = -jnp.where(probs > 0, log_probs * probs, 0).sum(-1, keepdims=True)
    surprise = jnp.abs(-log_probs - entropy)
    order = jnp.argsort(surprise, axis=-1)
    ordered = jnp.take_along_axis(surprise, order, axis=-1)
    total = jnp.cumsum(jnp.take_along_axis(probs, order, axis=-1), axis=-1)
    last = jnp.clip((total < mass).sum(-1, keepdims=True), keep - 1, logits.shape[-1] - 1)
    return jnp.where(surprise > jnp.take_along_axis(ordered, last, axis=-1), _NEVER, logits)


def _epsilon(logits, prefix, epsilon, keep):
    return _keep_at_least(logits, jax.nn.softmax(logits, axis=-1) >= epsilon, keep)


def _eta(logits, prefix, epsilon, keep):
    probs = jax.nn.softmax(logits, axis=-1)
    entropy = -jnp.where(probs > 0, probs * jnp.log(jnp.where(probs > 0, probs, 1)), 0).sum(-1, keepdims=True)
    cutoff = jnp.minimum(epsilon, jnp.sqrt(epsilon) * jnp.exp(-entropy))
    return _keep_at_least(logits, probs >= cutoff, keep)


def _keep_at_least(logits, kept, keep):
    ordered = jnp.sort(logits, axis=-1)
    border = jnp.take(ordered, jnp.maximum(logits.shape[-1] - keep, 0), axis=-1)[..., None]
    return jnp.where(kept | (logits >= border), logits, _NEVER)


def _repetition(logits, prefix, penalty, ignored):
    """Words said before, from column `ignored` of the prompt on, are divided (or multiplied) by the penalty."""
    vocab = logits.shape[-1]
    slot = jnp.arange(prefix.tokens.shape[1])
    counted = (slot < prefix.lengths[..., None]) & (slot >= ignored)
    said = _scattered(jnp.where(counted, prefix.tokens[:, None], vocab), vocab)
    return jnp.where(said, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)


def _no_repeat_ngram(logits, prefix, size_marker):
    """Forbid words that would complete an n-gram said before; n is the marker's (static) length."""
    size, vocab = size_marker.shape[0], logits.shape[-1]
    tokens, lengths = prefix.padded(size)
    slots = tokens.shape[1]
    index = lengths[..., None] - (size - 1) + jnp.arange(size - 1)  # the last n - 1 words
    tail = jnp.take_along_axis(tokens[:, None], jnp.maximum(index, 0), axis=2)
    padded = jnp.pad(tokens, ((0, 0), (0, size - 1)), constant_values=-1)
    match = jnp.ones((*lengths.shape, slots), bool)
    for offset in range(size - 1):
        match &= padded[:, None, offset : offset + slots] == tail[..., offset, None]
    end = jnp.arange(slots) + size - 1
    match &= (end < lengths[..., None]) & (lengths[..., None] >= size - 1)
    completing = padded[:, None, size - 1 : size - 1 + slots]
    return jnp.where(_scattered(jnp.where(match, completing, vocab), vocab), _NEVER, logits)


def _sequence_bias(logits, prefix, sequences, sizes, biases):
    """Add a bias to the last word of each sequence whose other words were just said.

    sequences int32 [n, longest], right-aligned; sizes int32 [n] (0 fills up); biases float32 [n].
    """
    longest = sequences.shape[1]
    tokens, lengths = prefix.padded(longest)
    index = lengths[..., None] - (longest - 1) + jnp.arange(longest - 1)
    tail = jnp.take_along_axis(tokens[:, None], jnp.maximum(index, 0), axis=2)[:, :, None]
    relevant = jnp.arange(longest - 1) >= longest - sizes[:, None]
    match = ((tail == sequences[:, :-1]) | ~relevant).all(-1)
    match &= (lengths[..., None] >= sizes - 1) & (sizes > 0)
    return logits.at[..., sequences[:, -1]].add(jnp.where(match, biases, 0.0))


def _suppress(logits, prefix, ids):
    return jnp.where(_members(ids, logits.shape[-1]), _NEVER, logits)


def _suppress_at(logits, prefix, ids, column):
    return jnp.where((prefix.columns == column)[..., None] & _members(ids, logits.shape[-1]), _NEVER, logits)


def _suppress_before(logits, prefix, ids, column):
    return jnp.where((prefix.columns < column)[..., None] & _members(ids, logits.shape[-1]), _NEVER, logits)


def _force_at(logits, prefix, ids, column):
    forced = jnp.where(_members(ids, logits.shape[-1]), 0.0, _NEVER)
    return jnp.where((prefix.columns == column)[..., None], forced, logits)


def _decay(logits, prefix, ids, start, factor):
    over = (prefix.columns - start)[..., None]
    extra = jnp.abs(logits) * (jnp.power(factor, over) - 1)
    chosen = _members(ids, logits.shape[-1]) & (over > 0) & jnp.isfinite(logits)
    return jnp.where(chosen, logits + extra, logits)


def _finite(logits, prefix):
    limits = jnp.finfo(jnp.float32)
    return jnp.nan_to_num(logits, nan=0.0, posinf=limits.max, neginf=limits.min)


def _normalize(logits, prefix):
    return jax.nn.log_softmax(logits, axis=-1)


def _members(ids, vocab):
    """bool [vocab]: which words are among ids (-1 fills up)."""
    return (jnp.arange(vocab)[:, None] == ids).any(-1)


def _scattered(ids, vocab):
    """int32 [batch, width, n] -> bool [batch, width, vocab]: which words occur; ids == vocab are dropped."""
    batch, width, _ = ids.shape
    rows, columns = jnp.arange(batch)[:, None, None], jnp.arange(width)[None, :, None]
    return jnp.zeros((batch, width, vocab), bool).at[rows, columns, ids].set(True, mode="drop")


_APPLY = {
    "temperature": _temperature, "top_k": _top_k, "top_p": _top_p, "min_p": _min_p, "typical": _typical, "epsilon": _epsilon,
    "eta": _eta, "repetition": _repetition, "no_repeat_ngram": _no_repeat_ngram, "sequence_bias": _sequence_bias,
    "suppress": _suppress, "suppress_at": _suppress_at, "suppress_before": _suppress_before, "force_at": _force_at,
    "decay": _decay, "finite": _finite, "normalize": _normalize,
}
_HELPS_DRAFT = {"repetition", "suppress", "suppress_at", "suppress_before", "sequence_bias", "force_at"}


# ---- HF objects -> rules ------------------------------------------------------------------------------------------


def _real(value):
    return np.float32(value)


def _whole(value):
    return np.int32(value)


def _ids(ids, fill=-1):
    ids = np.asarray(ids, np.int32).reshape(-1)
    return np.pad(ids, (0, -len(ids) % 8), constant_values=fill)


def _skips(ignored, pads):
    """Whether a `prompt_ignore_length` leaves just the padding out (HF's tensor), or counts columns where there is none."""
    return np.array_equal(ignored.cpu().numpy(), pads) if isinstance(ignored, torch.Tensor) else not pads.any()


def _from_repetition(p):
    ignored = p.prompt_ignore_length
    return Rule((_real(p.penalty), _whole(ignored if isinstance(ignored, int) else 0)), "repetition")


def _from_sequence_bias(p):
    biases = p.sequence_bias if isinstance(p.sequence_bias, dict) else {tuple(s): b for s, b in p.sequence_bias}
    longest = max(map(len, biases), default=1)
    count = max(8, 1 << max(len(biases) - 1, 0).bit_length())
    sequences, sizes, values = np.zeros((count, longest), np.int32), np.zeros(count, np.int32), np.zeros(count, np.float32)
    for i, (sequence, bias) in enumerate(biases.items()):
        sequences[i, longest - len(sequence) :], sizes[i], values[i] = sequence, len(sequence), bias
    return Rule((sequences, sizes, values), "sequence_bias")


_TRANSLATE = {
    hf.TemperatureLogitsWarper: lambda p: Rule((_real(p.temperature),), "temperature"),
    hf.TopKLogitsWarper: lambda p: Rule((_whole(p.top_k),), "top_k"),
    hf.TopPLogitsWarper: lambda p: Rule((_real(p.top_p), _whole(p.min_tokens_to_keep)), "top_p"),
    hf.MinPLogitsWarper: lambda p: Rule((_real(p.min_p), _whole(p.min_tokens_to_keep)), "min_p"),
    hf.TypicalLogitsWarper: lambda p: Rule((_real(p.mass), _whole(p.min_tokens_to_keep)), "typical"),
    hf.EpsilonLogitsWarper: lambda p: Rule((_real(p.epsilon), _whole(p.min_tokens_to_keep)), "epsilon"),
    hf.EtaLogitsWarper: lambda p: Rule((_real(p.epsilon), _whole(p.min_tokens_to_keep)), "eta"),
    hf.RepetitionPenaltyLogitsProcessor: _from_repetition,
    hf.NoRepeatNGramLogitsProcessor: lambda p: Rule((np.zeros(p.ngram_size, np.int8),), "no_repeat_ngram"),
    hf.SequenceBiasLogitsProcessor: _from_sequence_bias,
    hf.NoBadWordsLogitsProcessor: _from_sequence_bias,
    hf.SuppressTokensLogitsProcessor: lambda p: Rule((_ids(p.suppress_tokens),), "suppress"),
    hf.SuppressTokensAtBeginLogitsProcessor: lambda p: Rule((_ids(p.begin_suppress_tokens), _whole(p.begin_index)), "suppress_at"),
    hf.MinLengthLogitsProcessor: lambda p: Rule((_ids(p.eos_token_id), _whole(p.min_length)), "suppress_before"),
    hf.MinNewTokensLengthLogitsProcessor: lambda p: Rule(
        (_ids(p.eos_token_id), _whole(p.prompt_length_to_skip + p.min_new_tokens)), "suppress_before"),
    hf.ForcedBOSTokenLogitsProcessor: lambda p: Rule((_ids(p.bos_token_id), _whole(1)), "force_at"),
    hf.ForcedEOSTokenLogitsProcessor: lambda p: Rule((_ids(p.eos_token_id), _whole(p.max_length - 1)), "force_at"),
    hf.ExponentialDecayLengthPenalty: lambda p: Rule(
        (_ids(p.eos_token_id), _whole(p.regulation_start), _real(p.regulation_factor)), "decay"),
    hf.InfNanRemoveLogitsProcessor: lambda p: Rule((), "finite"),
    hf.LogitNormalization: lambda p: Rule((), "normalize"),
}
