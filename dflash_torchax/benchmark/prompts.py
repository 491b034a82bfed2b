"""Prompt sets: public data sets formatted as z-lab's benchmark does (so that tau compares), files, shipped ones."""

import dataclasses
import json
import os
import random
from collections.abc import Callable
from pathlib import Path

SHIPPED = Path(__file__).parent / "data" / "prompts"
_SEED = 42  # of z-lab's choice of rows; with the same one, the same prompts are measured
_STEP_BY_STEP = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@dataclasses.dataclass(frozen=True)
class PromptSet:
    """A named list of conversations, each a tuple of user turns."""

    name: str
    conversations: tuple[tuple[str, ...], ...]
    source: str


@dataclasses.dataclass(frozen=True)
class PublicSet:
    """Where a data set lives on the hub, and how a row becomes user turns."""

    path: str
    config: str | None
    split: str
    turns: Callable


def _code_turn(row):
    return (f"Write a solution to the following problem and make sure that it passes the tests:\n```python\n{row['prompt']}\n```",)


def _alpaca_turn(row):
    return ("\n\n".join(part for part in (row["instruction"], row["input"]) if part),)


PUBLIC = {
    "gsm8k": PublicSet("openai/gsm8k", "main", "test", lambda row: (row["question"] + _STEP_BY_STEP,)),
    "math500": PublicSet("HuggingFaceH4/MATH-500", None, "test", lambda row: (row["problem"] + _STEP_BY_STEP,)),
    "humaneval": PublicSet("openai/openai_humaneval", None, "test", _code_turn),
    "mbpp": PublicSet("google-research-datasets/mbpp", "sanitized", "test", lambda row: (row["prompt"],)),
    "mt-bench": PublicSet("HuggingFaceH4/mt_bench_prompts", None, "train", lambda row: tuple(row["prompt"])),
    "alpaca": PublicSet("tatsu-lab/alpaca", None, "train", _alpaca_turn),
}


def public_set(name, count):
    """The first `count` prompts of a public set, in z-lab's order.

    Raises:
        ValueError: unknown name.
        ConnectionError: the set is not in the local cache and cannot be fetched.
        ImportError: the package `datasets` is missing.
    """
    if name not in PUBLIC:
        raise ValueError(f"datasets: {name!r} is not known; choose among {', '.join(PUBLIC)}, or give --prompts FILE.jsonl.")
    try:
        from datasets import load_dataset
    except ImportError:
        raise ImportError("datasets: public sets need the package. Run: pip install 'dflash_torchax[benchmark]'") from None
    source = PUBLIC[name]
    try:
        rows = load_dataset(source.path, source.config, split=source.split)
    except Exception as error:  # the hub, the network and the package each have their own
        raise ConnectionError(
            f"datasets: {name} ({source.path}) could not be loaded ({type(error).__name__}); check the network, "
            f"or measure prompts of your own with --prompts FILE.jsonl."
        ) from error
    order = list(range(len(rows)))
    random.Random(_SEED).shuffle(order)
    chosen = tuple(source.turns(rows[index]) for index in order[:count])
    return PromptSet(name, chosen, f"{source.path}, {source.split}, {len(chosen)} of {len(rows)} rows shuffled with seed {_SEED}")


def file_set(text, count):
    """The first `count` prompts of a JSONL file; `text` is FILE or NAME=FILE, each line has `prompt` or `turns`.

    Raises:
        FileNotFoundError, ValueError: no such file, or a line that is not such an object; names file and line.
    """
    name, path = _name_and_path(text)
    found = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if len(found) == count:
                break
            if line.strip():
                found.append(_turns(line, f"prompts: {path} line {number}"))
    if not found:
        raise ValueError(f'prompts: {path} has no line; give JSON lines like {{"prompt": "..."}}.')
    return PromptSet(name or path.stem, tuple(found), f"{path.name}, first {len(found)}")


def _name_and_path(text):
    """(name or '', path) of FILE or NAME=FILE; both may contain '='."""
    for name, path in (("", text), text.partition("=")[::2], text.rpartition("=")[::2]):
        if path and os.path.isfile(os.path.expanduser(path)):
            return name, Path(path).expanduser()
    raise FileNotFoundError(f'prompts: {text} is not a file; give FILE or NAME=FILE of JSON lines like {{"prompt": "..."}}.')


def shipped_sets(count):
    """The small sets that come with the package, for runs without a network."""
    return [
        dataclasses.replace(file_set(str(path), count), source=f"shipped {path.name}") for path in sorted(SHIPPED.glob("*.jsonl"))
    ]


def _turns(line, where):
    try:
        row = json.loads(line)
        turns = row["turns"] if "turns" in row else [row["prompt"]]
    except (json.JSONDecodeError, KeyError, TypeError):
        raise ValueError(f"{where}: not a JSON object with 'prompt' or 'turns': {line.strip()[:60]!r}") from None
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError(f"{where}: 'prompt' must be a text and 'turns' a list of texts, none of them empty.")
    return tuple(turns)


def encode(tokenizer, messages, **template_options):
    """A conversation as a list of ids, through the chat template where there is one."""
    if getattr(tokenizer, "chat_template", None):
        encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, **template_options)
        return list(encoded["input_ids"])
    return list(tokenizer("\n".join(message["content"] for message in messages)).input_ids)


def expand(prompt_set, tokenizer, answer, **template_options):
    """Every user turn as a prompt of its own: ids of the conversation up to it.

    Args:
        answer: function from ids to the reply's text, called only where another turn follows.
    """
    prompts = []
    for turns in prompt_set.conversations:
        messages = []
        for index, turn in enumerate(turns):
            messages.append({"role": "user", "content": turn})
            prompts.append(encode(tokenizer, messages, **template_options))
            if index + 1 < len(turns):
                messages.append({"role": "assistant", "content": answer(prompts[-1])})
    return prompts
