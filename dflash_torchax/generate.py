"""The HF face: HF prepares a generate call as always, then this runs it and gives HF's output back."""

import dataclasses
import functools
import inspect

import numpy as np
import torch
from transformers import EosTokenCriteria, MaxLengthCriteria
from transformers.generation import GenerateDecoderOnlyOutput, UnbatchedClassifierFreeGuidanceLogitsProcessor

from . import processors
from .arguments import refuse_call, refuse_unsupported
from .columns import Columns
from .engine import Committed, Request, check_sampled, host_rules
from .host_loop import HostRun
from .inputs import check_tensors, padded_output, right_padded
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
        self._model = model
        self._cache_keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self._engines = {}  # of drafts given as assistant_model
        functools.update_wrapper(self, type(model).generate)

    def __call__(self, *args, **kwargs):
        call = self.prepare(*args, **kwargs)
        result = call.run()
        self.last_stats = call.stats
        return result

    def prepare(self, *args, **kwargs):
        """Everything HF does before decoding: a `Call` ready to run. Arguments are generate's.

        Raises:
            ValueError, NotImplementedError: naming the argument, its value and the way out.
        """
        kwargs = _by_name(type(self._model).generate, args, kwargs)
        streamer, generator, assistant, tokenizer = (
            kwargs.pop(name, None) for name in ("streamer", "generator", "assistant_model", "tokenizer")
        )
        check_tensors(kwargs)
        refuse_call(kwargs)
        if generator is not None and not isinstance(generator, torch.Generator):
            raise ValueError(f"generator: {generator!r}; give a torch.Generator, e.g. torch.Generator().manual_seed(0).")
        for name in [name for name in ("cache", "past_key_values") if name in kwargs]:
            kwargs[self._cache_keyword] = kwargs.pop(name)
        engine = self.engine if assistant is None else self._engine_for(assistant)

        def decode(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
            refuse_unsupported(generation_config, model_kwargs)
            prepared = (input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)
            return Call(engine, *prepared, streamer, generator)

        model = self._model if tokenizer is None else _with_tokenizer(self._model, tokenizer)
        return type(self._model).generate(model, streamer=streamer, custom_generate=decode, **kwargs)

    def __reduce__(self):
        raise TypeError("model: enabled, so its generate holds compiled programs; call disable(model) before you pickle it.")

    def __deepcopy__(self, memo):
        return Generate(memo.get(id(self._model), self._model), self.engine)

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


def _by_name(function, args, kwargs):
    """Positional arguments of HF's generate by their names."""
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    if len(args) > len(names):
        raise TypeError(f"generate: {len(args)} positional arguments, but it takes at most {len(names)}")
    given = dict(zip(names, args, strict=False))
    twice = given.keys() & kwargs.keys()
    if twice:
        raise TypeError(f"generate: got multiple values for argument {sorted(twice)[0]!r}")
    return {**given, **kwargs}


def _with_tokenizer(model, tokenizer):
    """The model as HF's preparation sees it: HF drops `tokenizer` on the way to a custom loop, but stop_strings need it."""

    class Prepared(type(model)):
        def _get_stopping_criteria(self, *args, **kwargs):
            return super()._get_stopping_criteria(*args, **{**kwargs, "tokenizer": tokenizer})

    view = object.__new__(Prepared)
    view.__dict__ = model.__dict__
    return view


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
        prompt, lengths = right_padded(input_ids, model_kwargs.get("attention_mask"))
        pads = (input_ids.shape[1] - lengths).astype(np.int32)
        rules = [processors.translate(p, engine.decoder.target.head_size, pads) for p in logits_processor]
        self.on_host = None in rules or self.keep_scores or self.keep_logits
        guided = any(isinstance(p, UnbatchedClassifierFreeGuidanceLogitsProcessor) for p in logits_processor)
        if guided and engine.decoder.target.is_streamed:
            raise NotImplementedError("guidance_scale: it runs the torch model, which load_target leaves without weights; load the "
                                      "model with from_pretrained instead.")
        reuse = model_kwargs.get("cache", model_kwargs.get("past_key_values"))
        self.request = self._request(prompt, lengths, pads, reuse, [] if self.on_host else rules)

    def run(self):
        """Decode: HF's tensor of ids, or a `GenerateOutput` where return_dict_in_generate is set."""
        run = None
        if self.on_host:
            run = self._host_run()
            generation = run.run()
            sequences = run.input_ids
            self._close(generation)
        elif self.streamer is None and not self._has_own_criteria():
            generation = self.engine.run(self.request)
            sequences = padded_output(self.input_ids, self.request, generation, self.pad_id)
            self._close(generation)
        else:
            columns = self._columns()
            *_, generation = self._stream(columns)
            sequences = columns.input_ids
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
        for item in self._stream(columns):
            if isinstance(item, Committed):
                yield columns.take()
            else:
                self.stats, self.cache = item.stats, item.cache

    def _stream(self, columns):
        """Run step by step to the end, feeding streamer and criteria; yields what `Engine.stream` does."""
        steps = self.engine.stream(self.request)
        item = next(steps)
        while isinstance(item, Committed):
            for column in columns.add(item):
                if self.streamer is not None:
                    self.streamer.put(column)
            yield item
            item = steps.send(columns.ended)
        self._close(item)
        yield item

    def _close(self, generation):
        """What every way to the end has in common."""
        if self.streamer is not None:
            self.streamer.end()
        if self.config.do_sample and not self.on_host:
            check_sampled(generation)

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

    def _request(self, prompt, lengths, pads, reuse, rules):
        new_tokens = int(self.config.max_length) - self.input_ids.shape[1]
        limits = (lengths + new_tokens).astype(np.int32)
        target, longest = self.engine.decoder.target, int(limits.max())
        for name, limit in (("max_length of enable()", self.engine.max_length), ("max_position_embeddings", target.max_positions)):
            if limit is not None and longest > limit:
                raise ValueError(f"max_length: prompt of {int(lengths.max())} tokens and {new_tokens} new ones make {longest}, "
                                 f"beyond {name} = {limit}. Lower max_new_tokens or shorten the prompt.")
        if prompt.min() < 0 or prompt.max() >= target.vocab_size:
            raise ValueError(f"input_ids: ids from {prompt.min()} to {prompt.max()}, but the model's embedding has "
                             f"{target.vocab_size} rows; use the tokenizer that belongs to the model.")
        if len(prompt) > 1 and not 0 <= self.pad_id < target.vocab_size:
            raise ValueError(f"pad_token_id: {self.pad_id} is outside the model's embedding of {target.vocab_size} rows.")
        eos = self.config._eos_token_tensor
        do_sample = bool(self.config.do_sample)
        seed = torch.randint(2**31, (2,), generator=self.generator).tolist() if do_sample and not self.on_host else (0, 0)
        if isinstance(reuse, GenerationCache):
            reuse.check_owner(self.engine)
        return Request(
            prompt, lengths, limits, () if eos is None else tuple(eos.reshape(-1).tolist()),
            host_rules(len(lengths), rules, pads, self.pad_id, seed,
                       do_sample=do_sample, draft_sampling=self.engine.draft_sampling if do_sample else "greedy"),
            reuse if isinstance(reuse, GenerationCache) else None, bool(self.config.return_dict_in_generate),
        )
