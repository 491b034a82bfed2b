"""A whole training run in one folder: corpus, held-out corpus, one folder per method, the exported draft.

Every stage looks at what the folder holds and does what is missing, so a killed run is started again with the same call.
"""

import dataclasses
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ..target import Target
from . import corpus, prompts, vocabulary
from .blocks import DFlashLearner
from .chains import Eagle3Learner
from .dataset import Dataset
from .export import export_dflash, export_eagle3
from .learner import Recipe, identity_of, tensors_of
from .losses import LossWeights, default_gamma
from .taps import TapReader, compute_missing, target_params_of
from .trainer import Trainer, trained_params

CORPUS, HELD_OUT, DRAFT, VOCABULARY = "corpus", "held-out", "draft", "vocabulary.json"


@dataclasses.dataclass(frozen=True)
class CorpusOptions:
    """How the corpora are generated.

    Fields:
        sequences: prompts to continue at most; None takes all.
        held_out: held-out prompts per source at most.
        max_new_tokens, max_prompt_tokens: longest continuation, and longest prompt taken.
        batch_size: rows per batch.
        shard_format: "safetensors" or "jsonl".
        temperature: 0 for greedy continuations, above for sampled ones.
        seed: of the mix and of the samples.
    """

    sequences: int | None = None
    held_out: int = 64
    max_new_tokens: int = 128
    max_prompt_tokens: int = 512
    batch_size: int = 32
    shard_format: str = "safetensors"
    temperature: float = 0.0
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class LearnOptions:
    """How a draft is trained; `schedule` and `losses` say the rest.

    Fields:
        anchors: random anchors per sequence and step.
        gamma: decay of the position weights; None takes the paper's for the block size.
        active_vocabulary: train a DFlash draft that guesses among all ids on logits over those that occur in the corpus only.
        cache_taps: keep the target's hidden states on disk (True) or recompute them at every step.
        compute_dtype: dtype of the operands of linear layers, "float32" or "bfloat16"; all else is float32.
        devices: devices to split batches over; None uses one without a mesh.
    """

    anchors: int = 32
    gamma: float | None = None
    losses: LossWeights = LossWeights()
    active_vocabulary: bool = True
    cache_taps: bool = True
    compute_dtype: str = "float32"
    devices: int | None = None


def generate_corpora(model, tokenizer, sources, folder, options=CorpusOptions(), *, layers=(), eos_ids=None, target="", **hooks):  # noqa: B008
    """Generate `folder/corpus` and `folder/held-out`, or what is missing of them.

    Args:
        sources: list of `PromptSource`.
        layers: layers whose hidden states are kept, `layers_of(draft, model)`; () keeps token ids only.
        eos_ids: ids that end a continuation; None takes the model's generation config's.
        hooks: on_shard, stop; see `corpus.generate`.

    Returns:
        whether both corpora are whole.
    """
    if eos_ids is None:
        eos_ids = model.generation_config.eos_token_id
        eos_ids = () if eos_ids is None else np.atleast_1d(eos_ids).tolist()
    common = {"batch_size": options.batch_size, "max_new_tokens": options.max_new_tokens,
              "max_prompt_tokens": options.max_prompt_tokens, "eos_ids": eos_ids, "target": target,
              "temperature": options.temperature, "seed": options.seed if options.temperature else 0}
    held_out = prompts.held_out(sources, options.held_out)
    mixes = {HELD_OUT: held_out, CORPUS: prompts.mixed(sources, options.seed, options.sequences)}
    plans = {name: corpus.plan(mix, tokenizer, **common) for name, mix in mixes.items() if mix}
    return all(corpus.generate(model, plan, Path(folder) / name, layers=layers, shard_format=options.shard_format, **hooks)
               for name, plan in plans.items())


def layers_of(draft, model):
    """Layers whose hidden states training this draft reads: its taps, then the last one."""
    depth = model.config.get_text_config(decoder=True).num_hidden_layers
    taps = draft.config.taps_for(depth) if is_eagle3(draft) else draft.config.target_layer_ids
    return (*taps, depth - 1)


def is_eagle3(draft):
    """Whether `draft` is an `Eagle3DraftModel`."""
    return hasattr(draft, "advance")


def continuations(folder):
    """Every `corpus.Sequence` of the corpus in `folder`."""
    return [s for _, shard in corpus.read(Path(folder) / CORPUS) for s in shard]


def make_trainer(model, draft, folder, schedule, options=LearnOptions(), *, name=None, on_shard=None, stop=None):  # noqa: B008
    """A `Trainer` for `draft` on the corpora in `folder`, resuming what `folder/name` holds.

    Args:
        model: HF target.
        draft: `DFlashDraftModel` or `Eagle3DraftModel`; its weights are where a new run starts.
        schedule: `Schedule`.
        name: subfolder of the run; None takes the method's.
        on_shard: called after each shard whose hidden states were computed.
        stop: called before each of those; true ends it, and there is no trainer yet: None is returned.

    Raises:
        ValueError: see `Trainer` and `learner.Recipe`; or `options.devices` is not a number of devices there are.
    """
    devices = _devices(options.devices)
    folder, layers = Path(folder), layers_of(draft, model)
    products = None if options.compute_dtype == "float32" else jnp.dtype(options.compute_dtype)
    target, params = Target(model, jax.default_backend(), products=products), target_params_of(model)
    gamma = default_gamma(draft.config.block_size) if options.gamma is None else options.gamma
    recipe = Recipe(options.anchors, gamma, options.losses)
    learner = (Eagle3Learner if is_eagle3(draft) else DFlashLearner)(draft, target, recipe)
    # Read in float32 whatever the products of training: what is kept serves every run.
    reader = TapReader(target if products is None else Target(model, jax.default_backend()), params, layers)
    shards = {part: corpus.read(folder / part) for part in (CORPUS, HELD_OUT) if (folder / part).is_dir()}
    longest = max(len(s.ids) for part in shards.values() for _, rows in part for s in rows)
    width = -(-longest // 32) * 32
    if options.cache_taps:
        for part in shards.values():
            if not compute_missing(part, reader, layers, width, schedule.batch_size, on_shard, stop):
                return None
    datasets = {part: Dataset(rows, layers=layers if options.cache_taps else None, width=width) for part, rows in shards.items()}
    run = run_folder(folder, draft, name)
    ids = _vocabulary(draft, datasets[CORPUS], target, run, options)
    head = None
    if ids is not None:
        head = ({**params, **target.head_rows(params, jnp.asarray(ids))}, vocabulary.columns_of(ids, target.vocab_size))
    mesh = None if devices is None else Mesh(np.array(devices), ("data",))
    return Trainer(learner, params, schedule, datasets[CORPUS], datasets.get(HELD_OUT), run, head=head,
                   judged_on_all=not is_eagle3(draft) and draft.vocabulary is None, reader=reader, mesh=mesh)


def run_folder(folder, draft, name=None):
    """Where the run `name` in `folder` keeps its checkpoints; None takes the method's name."""
    return Path(folder) / (name or ("eagle3" if is_eagle3(draft) else "dflash"))


def export(draft, run, folder=None, *, card=None):
    """Write the best parameters of a run as a checkpoint.

    Args:
        draft: the draft the run trained, its options included; its weights are not used.
        run: `run_folder` of the run.
        folder: where to write; None takes `draft` in the run's folder.
        card: text of README.md, or None.

    Raises:
        ValueError: the run trained nothing yet, or another draft.
    """
    write = export_eagle3 if is_eagle3(draft) else export_dflash
    params = trained_params(run, tensors_of(draft)[0], identity_of(draft))
    return write(draft, params, folder or run / DRAFT, card=card)


def _devices(count):
    """The first `count` devices, or None for one without a mesh."""
    found = jax.devices()
    if count is not None and not 1 <= count <= len(found):
        raise ValueError(f"devices: {count}, but there are {len(found)}; take 1 to {len(found)}.")
    return None if count is None else found[:count]


def _vocabulary(draft, dataset, target, run, options):
    """Ids the logits run over: a draft's own, else the active ones."""
    if is_eagle3(draft):
        return (np.arange(draft.config.draft_vocab_size) + draft.d2t.numpy()).astype(np.int32)
    if draft.vocabulary is not None:
        return draft.vocabulary.numpy().astype(np.int32)
    if not options.active_vocabulary:
        return None
    return kept_ids(run, lambda: vocabulary.occurring_ids(dataset.sequences, target.vocab_size))


def kept_ids(run, choose):
    """int32 ids of the run in that folder: the corpus may grow between two starts, the columns of a run must not move."""
    file = Path(run) / VOCABULARY
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch = file.with_suffix(".tmp")
        scratch.write_text(json.dumps(choose().tolist()))
        os.replace(scratch, file)
    return np.array(json.loads(file.read_text()), np.int32)


def draft_vocabulary(folder, name, model, count):
    """int32 [count], ascending: the most frequent ids of the corpus in `folder`, as they were when the run `name` began.

    Raises:
        ValueError: that run began with another number of ids.
    """
    vocab_size = model.get_input_embeddings().weight.shape[0]
    count = min(count, vocab_size)
    ids = kept_ids(Path(folder) / name, lambda: vocabulary.frequent_ids(continuations(folder), vocab_size, count))
    if len(ids) != count:
        raise ValueError(f"draft_vocabulary: {count}, but the run in {Path(folder) / name} began with {len(ids)} ids; "
                         f"ask for as many, or give the new run another name.")
    return ids
