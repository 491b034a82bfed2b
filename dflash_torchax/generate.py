"""The HF face: HF prepares a generate call as always, then this runs it and gives HF's output back."""

import copy
import dataclasses
import functools
import inspect

import numpy as np
import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList, StopStringCriteria
from transformers.generation import GenerateDecoderOnlyOutput

from . import processors
from .arguments import refuse_call, refuse_unsupported
from .columns import Columns
from .engine import Committed, Request, host_rules
from .host_loop import HostRun
from .session import GenerationCache
from .state import DecodeStats


@dataclasses.dataclass
class GenerateOutput(GenerateDecoderOnlyOutput):
    """HF's output of a decoder-only model, and the call's `DecodeStats`."""

    stats: DecodeStats | None = None


# transformers renamed the output's `past_key_values` to `cache` in 5.2x; both names work here.
_CACHE_FIELD, _OTHER_NAME = "cache", "past_key_values"
if "cache" not in {field.name for field in dataclasses.fields(GenerateDecoderOnlyOutput)}:
    _CACHE_FIELD, _OTHER_NAME = _OTHER_NAME, _CACHE_FIELD
setattr(GenerateOutput, _OTHER_NAME, property(lambda output: getattr(output, _CACHE_FIELD)))


class Generate:
    """The callable that `enable` puts at `model.generate`; same arguments and result as HF's.

    Beyond HF's: `generator` (a CPU `torch.Generator`) seeds sampling; default is torch's global one, as in HF.
    """

    def __init__(self, model, engine):
        self.engine = engine
        self.last_stats = None
        self._replaced = model.__dict__.get("generate")
        self._generate = functools.partial(type(model).generate, model)
        self._cache_keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self._engines = {}  # of drafts given as assistant_model
        functools.update_wrapper(self, type(model).generate)

    def __call__(self, *args, **kwargs):
        call = self.prepare(*args, **kwargs)
        result = call.run()
        self.last_stats = call.stats
        return result

    def prepare(self, *args, streamer=None, generator=None, assistant_model=None, **kwargs):
        """Everything HF does before decoding: a `Call` ready to run. Arguments are generate's.

        Raises:
            ValueError, NotImplementedError: naming the argument, its value and the way out.
        """
        _check_ids(args[0] if args else kwargs.get("inputs", kwargs.get("input_ids")))
        refuse_call(kwargs)
        kwargs = _with_stop_strings(kwargs)
        for name in [name for name in ("cache", "past_key_values") if name in kwargs]:
            kwargs[self._cache_keyword] = kwargs.pop(name)
        engine = self.engine if assistant_model is None else self._engine_for(assistant_model)

        def decode(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
            refuse_unsupported(generation_config, model_kwargs)
            prepared = (input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)
            return Call(engine, *prepared, streamer, generator)

        return self._generate(*args, streamer=streamer, custom_generate=decode, **kwargs)

    def restore(self, model):
        """Undo the replacement."""
        del model.generate
        if self._replaced is not None:
            model.generate = self._replaced

    def _engine_for(self, draft):
        """HF's spelling of a draft: the engine of this model with that draft, compiled once per draft."""
        if getattr(self.engine, "draft", None) is draft:
            return self.engine
        if id(draft) not in self._engines:
            try:
                self._engines[id(draft)] = self.engine.with_draft(draft)
            except TypeError as error:
                raise NotImplementedError(f"assistant_model: {error}; only DFlash drafts assist an enabled model.") from error
        return self._engines[id(draft)]


class Call:
    """One prepared call of generate; `run` returns what HF would, `blocks` iterates over committed blocks."""

    def __init__(self, engine, input_ids, logits_processor, stopping_criteria, config, model_kwargs, streamer, generator):
        self.engine, self.input_ids, self.config = engine, input_ids, config
        self.processors, self.criteria = logits_processor, stopping_criteria
        self.streamer, self.generator = streamer, generator
        self.pad_id = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
        self.stats = self.cache = None
        returns = config.return_dict_in_generate
        self.keep_scores, self.keep_logits = (bool(returns and flag) for flag in (config.output_scores, config.output_logits))
        rules = [processors.translate(p) for p in logits_processor]
        self.on_host = None in rules or self.keep_scores or self.keep_logits
        self.request = self._request(model_kwargs, [] if self.on_host else rules)

    def run(self):
        """Decode: HF's tensor of ids, or a `GenerateOutput` where return_dict_in_generate is set."""
        run = None
        if self.on_host:
            run = self._host_run()
            generation = run.run()
            sequences = run.input_ids
        elif self.streamer is None and not self._has_own_criteria():
            generation = self.engine.run(self.request)
            sequences = _padded_output(self.input_ids, self.request, generation, self.pad_id)
        else:
            columns = self._columns()
            *_, generation = self._stream(columns)
            sequences = columns.input_ids
        if self.streamer is not None:
            self.streamer.end()
        self.stats = generation.stats
        sequences = sequences.to(self.input_ids.device, self.input_ids.dtype)
        return self._output(sequences, generation, run) if self.config.return_dict_in_generate else sequences

    def blocks(self):
        """Yield (list of new ids per row, list of accepted draft tokens per row) as blocks are committed.

        The first item is each row's first token, which is the target's own. Afterwards `stats` and (where
        return_dict_in_generate is set) `cache` are those of the call.
        """
        if self.on_host:
            raise NotImplementedError("stream_blocks: these logits processors run on the host, column by column; use streamer=.")
        columns = self._columns()
        said = [0] * len(columns.rows)
        for item in self._stream(columns):
            if isinstance(item, Committed):
                new = [row[start:] for row, start in zip(columns.rows, said, strict=True)]
                said = [len(row) for row in columns.rows]
                yield new, [max(len(block) - 1, 0) for block in new]
            else:
                self.stats, self.cache = item.stats, item.cache

    def _stream(self, columns):
        """Run step by step, feeding streamer and criteria; yields what `Engine.stream` does."""
        steps = self.engine.stream(self.request)
        item = next(steps)
        while isinstance(item, Committed):
            for column in columns.add(item):
                if self.streamer is not None:
                    self.streamer.put(column)
            yield item
            item = steps.send(columns.ended)
        yield item

    def _host_run(self):
        return HostRun(
            self.engine, self.request._replace(eos_ids=()), self.input_ids.cpu(), self.processors, self.criteria,
            do_sample=bool(self.config.do_sample), pad_id=self.pad_id,
            has_eos=self._has_eos(), streamer=self.streamer,
            generator=self.generator, keep_scores=self.keep_scores, keep_logits=self.keep_logits,
        )

    def _columns(self):
        return Columns(self.input_ids, self.pad_id, self.criteria if self._has_own_criteria() else None, self._has_eos())

    def _has_eos(self):
        return any(hasattr(criterion, "eos_token_id") for criterion in self.criteria)

    def _has_own_criteria(self):
        """Whether anything but lengths and eos, which the device knows, may end a row."""
        return any(type(criterion) not in (MaxLengthCriteria, EosTokenCriteria) for criterion in self.criteria)

    def _output(self, sequences, generation, run):
        return GenerateOutput(
            sequences=sequences, stats=generation.stats,
            scores=run.scores if self.keep_scores else None, logits=run.logits if self.keep_logits else None,
            **{_CACHE_FIELD: generation.cache},
        )

    def _request(self, model_kwargs, rules):
        prompt, lengths = _right_padded(self.input_ids, model_kwargs.get("attention_mask"))
        new_tokens = self.config.max_length - self.input_ids.shape[1]
        limits = (lengths + new_tokens).astype(np.int32)
        target, longest = self.engine.decoder.target, int(limits.max())
        for name, limit in (("max_length of enable()", self.engine.max_length), ("max_position_embeddings", target.max_positions)):
            if limit is not None and longest > limit:
                raise ValueError(f"max_length: prompt of {int(lengths.max())} tokens and {new_tokens} new ones make {longest}, "
                                 f"beyond {name} = {limit}. Lower max_new_tokens or shorten the prompt.")
        if prompt.min() < 0 or prompt.max() >= target.vocab_size:
            raise ValueError(f"input_ids: ids from {prompt.min()} to {prompt.max()}, but the model's embedding has "
                             f"{target.vocab_size} rows; use the tokenizer that belongs to the model.")
        eos = self.config._eos_token_tensor
        do_sample = bool(self.config.do_sample)
        seed = torch.randint(2**31, (2,), generator=self.generator).tolist() if do_sample and not self.on_host else (0, 0)
        reuse = model_kwargs.get("cache", model_kwargs.get("past_key_values"))
        return Request(
            prompt, lengths, limits, () if eos is None else tuple(eos.reshape(-1).tolist()),
            host_rules(len(lengths), rules, (self.input_ids.shape[1] - lengths).astype(np.int32), self.pad_id, seed,
                       do_sample=do_sample, draft_sampling=self.engine.draft_sampling),
            reuse if isinstance(reuse, GenerationCache) else None, bool(self.config.return_dict_in_generate),
        )


def _check_ids(ids):
    """HF's own preparation fails obscurely on ids that are no [batch, length] tensor."""
    if ids is not None and (not isinstance(ids, torch.Tensor) or ids.ndim != 2):
        got = f"{ids.ndim}-D of shape {tuple(ids.shape)}" if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise ValueError(f"input_ids: {got}; give a torch tensor [batch, length], e.g. tokenizer(..., return_tensors='pt').")


def _with_stop_strings(kwargs):
    """HF drops the tokenizer on the way to a custom loop, so the criterion that needs it is made here."""
    kwargs = dict(kwargs)
    tokenizer, config = kwargs.pop("tokenizer", None), kwargs.get("generation_config")
    strings = kwargs.pop("stop_strings", None) or getattr(config, "stop_strings", None)
    if strings is None:
        return kwargs
    if tokenizer is None:
        raise ValueError(f"stop_strings: {strings!r} without a tokenizer; pass tokenizer=... to generate as well.")
    if config is not None:
        kwargs["generation_config"] = config = copy.deepcopy(config)
        config.stop_strings = None
    criterion = StopStringCriteria(tokenizer=tokenizer, stop_strings=strings)
    kwargs["stopping_criteria"] = StoppingCriteriaList([*(kwargs.get("stopping_criteria") or ()), criterion])
    return kwargs


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
                         f"(zeros, then ones). Set tokenizer.padding_side = 'left', and pass the attention_mask when a "
                         f"prompt contains the pad token.")
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
    return torch.cat([input_ids.cpu(), torch.from_numpy(new)], dim=1)

