"""Prompts for a corpus: read from files or datasets, mixed by share, the last of each held out."""

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import torch

# Batches in a row without a word after which a target is taken to write no prompts.
_EMPTY_BATCHES = 8


@dataclasses.dataclass(frozen=True)
class PromptSource:
    """Where prompts of one task come from.

    Fields:
        path: a JSONL file with one object per line, or `hf:owner/name[:split]` for a Hugging Face dataset.
        config: configuration of the dataset, for those that ask for one.
        task: name under which held-out results are reported; default is the file's stem.
        share: weight of the task in the mix.
        hold_out: that many prompts at the END of the source are never trained on.
        field: key of the text in each object; a list of chat messages is taken as well.
    """

    path: str
    task: str = ""
    share: float = 1.0
    hold_out: int = 0
    field: str = "prompt"
    config: str | None = None

    def __post_init__(self):
        if not self.share > 0:
            raise ValueError(f"prompts: share={self.share} of {self.path}; a share is above 0. Leave the source out instead.")
        if self.config and not self.path.startswith("hf:"):
            raise ValueError(f"prompts: config={self.config} of {self.path}, which is a file; only hf: datasets have one.")

    @classmethod
    def parse(cls, text):
        """`PATH[,task=NAME][,share=S][,hold_out=N][,field=KEY][,config=NAME]` as the command line spells it."""
        path, *options = text.split(",")
        types = {"task": str, "share": float, "hold_out": int, "field": str, "config": str}
        fields = {}
        for option in options:
            name, _, value = option.partition("=")
            if name not in types:
                raise ValueError(f"prompts: unknown option {name!r} in {text!r}; known are {', '.join(types)}.")
            try:
                fields[name] = types[name](value)
            except ValueError:
                raise ValueError(f"prompts: {option!r} in {text!r} is not a {types[name].__name__}.") from None
        return cls(path, **fields)

    @property
    def name(self):
        return self.task or Path(self.path.removeprefix("hf:").split(":")[0]).stem

    def read(self):
        """(prompts to train on, prompts held out); each a string or a list of chat messages."""
        rows = _dataset_rows(self.path[3:], self.config) if self.path.startswith("hf:") else _jsonl_rows(self.path)
        prompts = []
        for number, row in enumerate(rows, 1):
            if self.field not in row:
                raise ValueError(f"prompts: line {number} of {self.path} has no {self.field!r} (it has {sorted(row)}); "
                                 f"name the key with field=KEY.")
            prompts.append(row[self.field])
        if not 0 <= self.hold_out < max(len(prompts), 1):
            raise ValueError(f"prompts: hold_out={self.hold_out} of {self.path}, which has {len(prompts)} prompts; hold out fewer.")
        cut = len(prompts) - self.hold_out
        return prompts[:cut], prompts[cut:]


def mixed(sources, seed=0, limit=None):
    """Interleave the training prompts of several sources by share.

    Any prefix of the result holds the tasks in these shares (as long as each lasts), so a corpus may stop anywhere.

    Returns:
        list of (task, prompt), the same for the same arguments.
    """
    generator = np.random.default_rng(seed)
    queues = []
    for source in sources:
        prompts, _ = source.read()
        queues.append([(source.name, prompts[i]) for i in generator.permutation(len(prompts))])
    taken, mix = [0] * len(queues), []
    while limit is None or len(mix) < limit:
        open_queues = [i for i, queue in enumerate(queues) if taken[i] < len(queue)]
        if not open_queues:
            break
        # The one furthest behind its share.
        chosen = min(open_queues, key=lambda i: (taken[i] + 1) / sources[i].share)
        mix.append(queues[chosen][taken[chosen]])
        taken[chosen] += 1
    return mix


def held_out(sources, limit=None):
    """(task, prompt) of every held-out prompt, at most `limit` per source."""
    return [(source.name, prompt) for source in sources for prompt in source.read()[1][:limit]]


def encode(tokenizer, prompt):
    """Prompt -> list of ids: through the chat template where the tokenizer has one."""
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    if getattr(tokenizer, "chat_template", None):
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])
    return list(tokenizer("\n".join(message["content"] for message in messages))["input_ids"])


def _jsonl_rows(path):
    file = Path(path).expanduser()
    if not file.is_file():
        raise FileNotFoundError(f"prompts: {path} is not a file; give a JSONL file, or hf:owner/name for a Hugging Face dataset.")
    rows = []  # (not splitlines: a JSON string may hold U+2028, which is no end of line)
    for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), 1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"prompts: line {number} of {path} is not JSON ({error}); give one object per line.") from error
    return rows


def _dataset_rows(name, config):
    try:
        from datasets import load_dataset
    except ImportError:
        raise ImportError("prompts: hf: sources need the package datasets. Run: pip install datasets") from None
    name, _, split = name.partition(":")
    return load_dataset(name, config, split=split or "train")


def synthesise(model, tokenizer, count, folder, *, seed=0, batch_size=16, max_new_tokens=96):
    """Let the target write its own prompts: it continues its chat template from where a user's message begins.

    Args:
        model: HF target on the CPU.
        folder: the prompts are kept there as `synthesised.jsonl`, and read back when they are enough.
        seed: of the sampling (temperature 1, no truncation).

    Returns:
        a `PromptSource` of `count` prompts, of which every tenth, at most 64, are held out.

    Raises:
        ValueError: the tokenizer has no chat template, or the target writes nothing.
    """
    file = Path(folder) / "synthesised.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    kept = [row["prompt"] for row in _jsonl_rows(file)] if file.is_file() else []
    opening, empty = _user_opening(tokenizer), 0
    while len(kept) < count:
        torch.manual_seed(seed + len(kept) + empty)
        ids = torch.tensor([opening] * batch_size)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                             max_new_tokens=max_new_tokens)
        texts = tokenizer.batch_decode(out[:, len(opening) :], skip_special_tokens=True)
        written = [text.strip() for text in texts if text.strip()]
        empty = 0 if written else empty + 1
        if empty == _EMPTY_BATCHES:
            raise ValueError(f"synthesise: {count}, but in {empty} batches the target ended every prompt before its first word; "
                             f"give prompts instead.")
        kept += written[: count - len(kept)]
        scratch = file.with_suffix(".tmp")
        scratch.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in kept))
        os.replace(scratch, file)
    return PromptSource(str(file), task="synthesised", hold_out=min(count // 10, 64))


def _user_opening(tokenizer):
    """Ids of a chat up to where the user's text begins."""
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("synthesise: this tokenizer has no chat template; give prompts instead.")
    mark = "\u2402mark\u2402"
    text = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    return tokenizer(text[: text.index(mark)], add_special_tokens=False)["input_ids"]
