"""The HF face: HF prepares a generate call as always, then this runs it and gives HF's output back."""

import functools

import numpy as np
import torch

from .arguments import refuse_unsupported
from .engine import Committed, Request


class Generate:
    """The callable that `enable` puts at `model.generate`; same arguments and result as HF's."""

    def __init__(self, model, engine):
        self.engine = engine
        self.last_stats = None
        self._replaced = model.__dict__.get("generate")
        self._generate = functools.partial(type(model).generate, model)
        functools.update_wrapper(self, type(model).generate)

    def __call__(self, *args, streamer=None, **kwargs):
        _check_ids(args[0] if args else kwargs.get("inputs", kwargs.get("input_ids")))
        if kwargs.get("custom_generate") is not None:
            raise NotImplementedError("custom_generate: an enabled model has its own decoding loop; call disable(model) first.")
        if kwargs.get("assistant_model") is not None:
            raise NotImplementedError("assistant_model: pass the draft to enable(model, draft) instead.")
        if kwargs.get("synced_gpus"):
            raise NotImplementedError("synced_gpus: not supported; leave it out.")
        decode = functools.partial(self._decode, streamer)
        return self._generate(*args, streamer=streamer, custom_generate=decode, **kwargs)

    def restore(self, model):
        """Undo the replacement."""
        del model.generate
        if self._replaced is not None:
            model.generate = self._replaced

    def _decode(self, streamer, model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
        """What HF calls instead of its own decoding loop, with everything prepared."""
        refuse_unsupported(generation_config, logits_processor, stopping_criteria, model_kwargs)
        request = self._request(input_ids, model_kwargs.get("attention_mask"), generation_config)
        pad_id = _pad_id(generation_config)
        generation = self.engine.run(request) if streamer is None else self._stream(request, streamer, pad_id)
        self.last_stats = generation.stats
        return _padded_output(input_ids, request, generation, pad_id)

    def _request(self, input_ids, attention_mask, generation_config):
        prompt, lengths = _right_padded(input_ids, attention_mask)
        new_tokens = generation_config.max_length - input_ids.shape[1]
        limits = (lengths + new_tokens).astype(np.int32)
        target, longest = self.engine.decoder.target, int(limits.max())
        for name, limit in (("max_length of enable()", self.engine.max_length), ("max_position_embeddings", target.max_positions)):
            if limit is not None and longest > limit:
                raise ValueError(f"max_length: prompt of {int(lengths.max())} tokens and {new_tokens} new ones make {longest}, "
                                 f"beyond {name} = {limit}. Lower max_new_tokens or shorten the prompt.")
        if prompt.min() < 0 or prompt.max() >= target.vocab_size:
            raise ValueError(f"input_ids: ids from {prompt.min()} to {prompt.max()}, but the model's embedding has "
                             f"{target.vocab_size} rows; use the tokenizer that belongs to the model.")
        eos = generation_config._eos_token_tensor
        return Request(prompt, lengths, limits, () if eos is None else tuple(eos.reshape(-1).tolist()))

    def _stream(self, request, streamer, pad_id):
        """Feed the streamer column by column, as HF does: a column goes out once every row has it or has ended."""
        columns = ColumnBuffer(len(request.lengths), pad_id)
        for item in self.engine.stream(request):
            for column in columns.add(item) if isinstance(item, Committed) else ():
                streamer.put(torch.from_numpy(column))
        streamer.end()
        return item


class ColumnBuffer:
    """Turns ragged commits into HF's columns of one token per row, each exactly once and in order."""

    def __init__(self, batch_size, pad_id):
        self.rows = [[] for _ in range(batch_size)]
        self.pad_id = pad_id
        self.sent = 0

    def add(self, committed):
        """Take in a step; yield int64 [batch] for every column that is complete now."""
        for row, tokens, count in zip(self.rows, committed.tokens, committed.counts, strict=True):
            row.extend(tokens[:count].tolist())
        running = [len(row) for row, done in zip(self.rows, committed.finished, strict=True) if not done]
        ready = min(running) if running else max(len(row) for row in self.rows)
        for index in range(self.sent, ready):
            yield np.array([row[index] if index < len(row) else self.pad_id for row in self.rows], np.int64)
        self.sent = max(self.sent, ready)


def _check_ids(ids):
    """HF's own preparation fails obscurely on ids that are no [batch, length] tensor."""
    if ids is not None and (not isinstance(ids, torch.Tensor) or ids.ndim != 2):
        got = f"{ids.ndim}-D of shape {tuple(ids.shape)}" if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise ValueError(f"input_ids: {got}; give a torch tensor [batch, length], e.g. tokenizer(..., return_tensors='pt').")


def _right_padded(input_ids, attention_mask):
    """HF's left-padded batch -> (int32 [batch, width] right-padded, int32 [batch] lengths)."""
    ids = input_ids.cpu().numpy()
    mask = np.ones_like(ids) if attention_mask is None else attention_mask.cpu().numpy()
    if mask.shape != ids.shape:
        raise ValueError(f"attention_mask: shape {mask.shape} for input_ids of shape {ids.shape}; they must be equal.")
    mask = mask != 0
    lengths = mask.sum(axis=1).astype(np.int32)
    if ids.shape[1] == 0 or (lengths == 0).any():
        raise ValueError(f"input_ids: empty prompt (lengths {lengths.tolist()}); each row needs at least one token.")
    if not (np.diff(mask.astype(np.int8), axis=1) >= 0).all():
        row = int(np.argmax((np.diff(mask.astype(np.int8), axis=1) < 0).any(axis=1)))
        raise ValueError(f"attention_mask: row {row} is {mask[row].astype(int).tolist()}; only left padding is supported "
                         f"(zeros, then ones). Set tokenizer.padding_side = 'left'.")
    width = int(lengths.max())
    prompt = np.zeros((len(ids), width), np.int32)
    for row, length in enumerate(lengths):
        prompt[row, :length] = ids[row, ids.shape[1] - length :]
    return prompt, lengths


def _padded_output(input_ids, request, generation, pad_id):
    """HF's output: the given ids, then the new tokens, pad_id after a row's end."""
    counts = generation.lengths - request.lengths
    new = np.full((len(counts), int(counts.max())), pad_id, np.int64)
    for row, (start, count) in enumerate(zip(request.lengths, counts, strict=True)):
        new[row, :count] = generation.tokens[row, start : start + count]
    return torch.cat([input_ids, torch.from_numpy(new).to(input_ids.device, input_ids.dtype)], dim=1)


def _pad_id(generation_config):
    pad = generation_config._pad_token_tensor
    return 0 if pad is None else int(pad)


