"""The target's own continuations as shards of token ids, generated in batches and resumable at any batch.

A corpus folder holds `corpus.json` (how it was made) and one shard per batch. A shard is written under another name
and renamed, so a killed run leaves whole shards only; running again with the same settings makes the missing ones.
"""

import dataclasses
import hashlib
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from ..engine import Engine, Request, host_rules
from ..processors import Rule
from ..target import Target
from .prompts import encode
from .taps import Recorder, feature_file, save_features

# Batches whose prompts are sorted by length together, so that a batch's rows are about equally long.
_SORTED_TOGETHER = 8
MANIFEST = "corpus.json"


@dataclasses.dataclass(frozen=True)
class Sequence:
    """One prompt and its continuation: ids int32 [length], of which the first `prompt_length` are the prompt."""

    ids: np.ndarray
    prompt_length: int
    task: str


@dataclasses.dataclass(frozen=True)
class CorpusPlan:
    """What is generated, in which batches; the same arguments give the same plan.

    Fields:
        prompts: list of (task, ids).
        batch_size: rows per batch (the last may be smaller).
        max_new_tokens: longest continuation.
        eos_ids: ids that end one.
        target: name of the target, for the record.
        temperature: 0 takes the argmax; above, samples at that temperature.
        seed: of the samples.
    """

    prompts: list
    batch_size: int
    max_new_tokens: int
    eos_ids: tuple[int, ...]
    target: str = ""
    temperature: float = 0.0
    seed: int = 0

    def batches(self):
        """Lists of indices into `prompts`."""
        window = self.batch_size * _SORTED_TOGETHER
        order = []
        for start in range(0, len(self.prompts), window):
            order += sorted(range(start, min(start + window, len(self.prompts))), key=lambda i: len(self.prompts[i][1]))
        return [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]

    def manifest(self):
        """What `corpus.json` records; two plans with equal manifests make equal corpora."""
        digest = hashlib.sha256(json.dumps(self.prompts).encode()).hexdigest()
        sampled = f"temperature {self.temperature}, seed {self.seed}"
        return {
            "target": self.target, "prompts": len(self.prompts), "prompts_sha256": digest, "batch_size": self.batch_size,
            "max_new_tokens": self.max_new_tokens, "eos_ids": list(self.eos_ids),
            "decoding": sampled if self.temperature else "greedy", "tasks": sorted({task for task, _ in self.prompts}),
        }


def plan(mix, tokenizer, *, batch_size, max_new_tokens, max_prompt_tokens, eos_ids, target="", temperature=0.0, seed=0):
    """Encode (task, prompt) pairs and plan their batches; prompts above `max_prompt_tokens` are left out."""
    encoded = [(task, encode(tokenizer, prompt)) for task, prompt in mix]
    kept = [(task, ids) for task, ids in encoded if 0 < len(ids) <= max_prompt_tokens]
    if not kept:
        raise ValueError(f"max_prompt_tokens: {max_prompt_tokens} leaves none of {len(mix)} prompts; raise it.")
    return CorpusPlan(kept, batch_size, max_new_tokens, tuple(eos_ids), target, temperature, seed)


def generate(model, corpus_plan, folder, *, layers=(), shard_format="safetensors", on_shard=None, stop=None):
    """Generate every missing shard of a plan through the compiled loop.

    Args:
        model: HF target, from `from_pretrained` or `load_target`.
        corpus_plan: see `plan`.
        folder: corpus folder; created, or continued if it was made by the same plan.
        layers: target layers whose hidden states are kept beside the shards (see `taps`); () for none.
        shard_format: "safetensors" or "jsonl".
        on_shard: called with (batches done, batches in all, new tokens of this shard).
        stop: called before each batch; true ends the run there.

    Returns:
        whether the corpus is whole.

    Raises:
        ValueError: the folder holds a corpus of another plan, or the target has too few positions for the longest sequence.
    """
    folder, longest = Path(folder), max(len(ids) for _, ids in corpus_plan.prompts) + corpus_plan.max_new_tokens
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if positions is not None and longest > positions:
        raise ValueError(f"max_new_tokens: {corpus_plan.max_new_tokens} behind the longest prompt make {longest} tokens, beyond "
                         f"max_position_embeddings = {positions}. Lower it, or max_prompt_tokens.")
    _open_folder(folder, corpus_plan.manifest())
    batches = corpus_plan.batches()
    missing = [i for i in range(len(batches)) if not _shard_files(folder, i)]
    engine = _engine(model, layers) if missing else None
    for number in missing:
        if stop is not None and stop():
            return False
        rows = [corpus_plan.prompts[i] for i in batches[number]]
        sequences, features = _continue(engine, rows, corpus_plan, number)
        file = folder / f"shard-{number:05d}.{shard_format}"
        if layers:
            save_features(feature_file(file, layers), features)
        _write_shard(file, sequences)
        if on_shard is not None:
            done = len(batches) - len(missing) + missing.index(number) + 1
            on_shard(done, len(batches), sum(len(s.ids) - s.prompt_length for s in sequences))
    return True


def read(folder):
    """[(shard file, list of `Sequence`)] of a corpus folder, in order; shards being written are not seen."""
    folder = Path(folder)
    files = sorted(file for file in folder.glob("shard-*.*") if file.suffix in (".safetensors", ".jsonl"))
    if not files:
        raise FileNotFoundError(f"corpus: {folder} has no shard-*.safetensors or shard-*.jsonl; generate the corpus first.")
    return [(file, _read_shard(file)) for file in files]


def _engine(model, layers):
    if not layers:
        return Engine(model)
    return Engine(model, Recorder(Target(model, jax.default_backend()), layers))


def _rules(corpus_plan, number, batch_size):
    """How batch `number` chooses its tokens; None is greedy. Each batch has its own seed, so a resumed run samples alike."""
    if not corpus_plan.temperature:
        return None
    warp = Rule((np.float32(corpus_plan.temperature),), "temperature")
    return host_rules(batch_size, (warp,), seed=(corpus_plan.seed, number), do_sample=True)


def _continue(engine, rows, corpus_plan, number):
    """(continuations, features) of one batch; a short last batch is filled up so that no other shape compiles."""
    filled = rows + [rows[-1]] * (corpus_plan.batch_size - len(rows))
    lengths = np.array([len(ids) for _, ids in filled], np.int32)
    prompt = np.zeros((len(filled), lengths.max()), np.int32)
    for row, (_, ids) in zip(prompt, filled, strict=True):
        row[: len(ids)] = ids
    limits = lengths + corpus_plan.max_new_tokens
    request = Request(prompt, lengths, limits, corpus_plan.eos_ids, _rules(corpus_plan, number, len(filled)))
    state = engine.decode_loop(engine.params, engine.start(request))
    out = engine.finish(state, request)
    sequences = [
        Sequence(out.tokens[i, : out.lengths[i]].astype(np.int32), len(ids), task) for i, (task, ids) in enumerate(rows)
    ]
    recorded = state.draft_cache
    if isinstance(recorded, tuple):
        return sequences, None
    # The last token was committed but never read: its row stays zero, and no anchor looks at it.
    recorded = np.asarray(recorded.astype(jnp.bfloat16))
    return sequences, [recorded[i, : len(s.ids)] for i, s in enumerate(sequences)]


def _open_folder(folder, manifest):
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / MANIFEST
    if file.is_file():
        before = json.loads(file.read_text())
        changed = {name: (before.get(name), value) for name, value in manifest.items() if before.get(name) != value}
        if changed:
            raise ValueError(f"corpus: {folder} was made with other settings (before, now): {changed}. Use another folder.")
    else:
        scratch = file.with_suffix(".tmp")
        scratch.write_text(json.dumps(manifest, indent=2) + "\n")
        os.replace(scratch, file)


def _shard_files(folder, number):
    return [file for suffix in ("safetensors", "jsonl") if (file := folder / f"shard-{number:05d}.{suffix}").is_file()]


def _write_shard(file, sequences):
    scratch = file.with_name("writing-" + file.name)
    if file.suffix == ".jsonl":
        rows = [{"task": s.task, "prompt_ids": s.ids[: s.prompt_length].tolist(), "response_ids": s.ids[s.prompt_length :].tolist()}
                for s in sequences]
        scratch.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        tokens = np.concatenate([s.ids for s in sequences])
        narrow = np.uint16 if tokens.max() < 2**16 else np.int32
        arrays = {
            "tokens": tokens.astype(narrow),
            "lengths": np.array([len(s.ids) for s in sequences], np.int32),
            "prompt_lengths": np.array([s.prompt_length for s in sequences], np.int32),
        }
        save_file(arrays, scratch, metadata={"tasks": json.dumps([s.task for s in sequences])})
    os.replace(scratch, file)


def _read_shard(file):
    if file.suffix == ".jsonl":
        rows = [json.loads(line) for line in file.read_text().split("\n") if line]
        return [Sequence(np.array(r["prompt_ids"] + r["response_ids"], np.int32), len(r["prompt_ids"]), r["task"]) for r in rows]
    from safetensors import safe_open

    with safe_open(file, framework="numpy") as opened:
        tasks = json.loads(opened.metadata()["tasks"])
    arrays = load_file(file)
    pieces = np.split(arrays["tokens"].astype(np.int32), np.cumsum(arrays["lengths"])[:-1])
    return [Sequence(ids, int(n), task) for ids, n, task in zip(pieces, arrays["prompt_lengths"], tasks, strict=True)]
