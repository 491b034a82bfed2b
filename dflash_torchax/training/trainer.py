"""The training loop: one pure step, a host loop that can be killed anywhere and resumed to the same numbers."""

import dataclasses
import json
import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from tqdm import tqdm

from . import checkpoint
from .learner import Frozen, sample_anchors, spread_anchors

CHECKPOINT, BEST, LOG = "checkpoint.safetensors", "best.safetensors", "log.jsonl"


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How long and how fast to train.

    Fields:
        steps: optimizer steps in all.
        batch_size: sequences per step.
        learning_rate, warmup: peak rate of a cosine schedule, and the share of `steps` that leads up to it.
        clip: largest global norm of the gradient.
        seed: of the order of the sequences and of the anchors.
        evaluate_every, save_every: steps between evaluations (the last step has one as well), and between checkpoints.
        patience: evaluations without a better held-out tau after which to stop; None never stops early.
        held_out_anchors: anchors per held-out sequence.
    """

    steps: int
    batch_size: int = 8
    learning_rate: float = 6e-4
    warmup: float = 0.04
    clip: float = 1.0
    seed: int = 0
    evaluate_every: int = 100
    save_every: int = 100
    patience: int | None = None
    held_out_anchors: int = 32

    def optimizer(self):
        """AdamW as in the paper, without weight decay: the corpus is seen a few times only."""
        rising = max(1, round(self.warmup * self.steps))
        rate = optax.warmup_cosine_decay_schedule(
            0.0, self.learning_rate, rising, max(self.steps, rising + 1), 0.05 * self.learning_rate)
        return optax.chain(optax.clip_by_global_norm(self.clip), optax.adamw(rate, weight_decay=0.0))


@dataclasses.dataclass
class Record:
    """Where a run stands: step done, best held-out tau, evaluations since then, seconds spent training."""

    step: int = 0
    best_tau: float = 0.0
    stale: int = 0
    seconds: float = 0.0


class Trainer:
    """Train a learner on a dataset.

    Args:
        learner: `DFlashLearner` or `Eagle3Learner`.
        target_params: the target's parameters.
        schedule: `Schedule`.
        dataset, held_out: `Dataset`s; held_out may be None (then there is no tau to stop on).
        folder: where checkpoints and the log go; a checkpoint found there is resumed.
        head: (parameters the head runs on, columns of ids) from `vocabulary`; None uses the whole vocabulary.
        judged_on_all: whether evaluation runs over the whole vocabulary all the same, as a draft without one of its own guesses.
        reader: `TapReader` to recompute features with, where the datasets have none.
        mesh: `jax.sharding.Mesh` with an axis "data" to split batches over.

    Raises:
        ValueError: the batch does not divide over the mesh, the checkpoint is another run's, or there is patience without a
            held-out set.
    """

    def __init__(self, learner, target_params, schedule, dataset, held_out, folder, *, head=None, judged_on_all=False, reader=None,
                 mesh=None):
        if schedule.patience is not None and held_out is None:
            raise ValueError(f"patience: {schedule.patience}, but no prompts are held out to judge by; hold some out "
                             f"(hold_out=N of a prompt source), or leave patience out.")
        self.learner, self.schedule, self.reader = learner, schedule, reader
        self.dataset, self.held_out, self.folder = dataset, held_out, Path(folder)
        self._batch_sharding, everywhere = _shardings(mesh, schedule.batch_size)
        head_params, columns = (target_params, None) if head is None else head
        frozen = Frozen(target_params, head_params, None if columns is None else jnp.asarray(columns), learner.buffers)
        self.optimizer = schedule.optimizer()
        self.params, self.state, self.record = learner.params, self.optimizer.init(learner.params), Record()
        self.folder.mkdir(parents=True, exist_ok=True)
        if (self.folder / CHECKPOINT).is_file():
            self.params, self.state, record = checkpoint.load(
                self.folder / CHECKPOINT, self.params, self.state, learner.identity)
            self.record = Record(**record)
        # Copies: the step donates its arguments, and the learner's own arrays are not the trainer's to give away.
        place = lambda tree: jax.tree.map(lambda x: jnp.array(x, copy=True, device=everywhere), tree)
        self.params, self.state = place(self.params), place(self.state)
        self.frozen = frozen if mesh is None else jax.device_put(frozen, everywhere)
        self.judge = self.frozen._replace(head=self.frozen.target, columns=None) if judged_on_all else self.frozen
        self.train_step = jax.jit(self._train_step, donate_argnums=(0, 1))
        self.evaluate_step = jax.jit(self._evaluate_step)
        self.accepted_from = jax.jit(self._accepted_from)

    def fit(self, *, progress=True, stop=None):
        """Train to the end of the schedule, to the end of patience, or until `stop()`; returns the `Record`."""
        schedule, record = self.schedule, self.record
        _truncate_log(self.folder / LOG, record.step)
        bar = tqdm(total=schedule.steps, initial=record.step, unit="step", disable=None if progress else True, dynamic_ncols=True)
        shown, labels, began = {}, 0, time.perf_counter()
        since = began
        while record.step < schedule.steps and not self._out_of_patience() and not (stop is not None and stop()):
            batch = self._batch(self.dataset, self.dataset.indices_at(record.step, schedule.batch_size, schedule.seed))
            self.params, self.state, loss, tau, count = self.train_step(
                self.params, self.state, self.frozen, batch, jnp.int32(record.step))
            record.step += 1
            labels += int(count)
            shown |= {"loss": f"{loss:.3f}", "tau": f"{tau:.2f}", "tok/s": f"{labels / (time.perf_counter() - since):.0f}"}
            self._log({"step": record.step, "loss": float(loss), "tau": float(tau)})
            if self.held_out is not None and (record.step % schedule.evaluate_every == 0 or record.step == schedule.steps):
                shown["held-out tau"] = f"{self._judge(began):.3f}"
            bar.set_postfix(shown, refresh=False)
            bar.update()
            if record.step % schedule.save_every == 0:
                began = self._save(began)
        bar.close()
        self._save(began)
        return record

    def evaluate(self, dataset):
        """Teacher-forced figures: dict of tau, by_task (name -> tau) and accepted_by_position."""
        counts = {task: np.zeros(self.learner.block_size, np.int64) for task in dataset.tasks}
        for indices in dataset.in_order(self.schedule.batch_size):
            accepted, exists = jax.device_get(self.evaluate_step(self.params, self.judge, self._batch(dataset, indices)))
            for index, row, real in zip(indices, accepted, exists, strict=True):
                if index >= 0:
                    counts[dataset.sequences[index].task] += np.bincount(row[real], minlength=self.learner.block_size)
        total = sum(counts.values())
        return {
            "tau": _tau(total),
            "by_task": {task: _tau(histogram) for task, histogram in counts.items()},
            "accepted_by_position": (total[::-1].cumsum()[::-1][1:] / max(total.sum(), 1)).round(4).tolist(),
        }

    def loop_tau(self, dataset, params=None):
        """tau by task as generating these continuations would give it: task -> (tau, steps); near-ties aside, for the hidden
        states are kept in bfloat16.

        `params` None takes the present ones. Greedy output does not depend on the draft, so every block's anchor follows
        from what the blocks before it accepted.
        """
        params, steps = self.params if params is None else params, {task: [] for task in dataset.tasks}
        number, longest = self.schedule.held_out_anchors, max(len(s.ids) - s.prompt_length for s in dataset.sequences)
        for indices in dataset.in_order(self.schedule.batch_size):
            batch = self._batch(dataset, indices)
            windows = [self.accepted_from(params, self.judge, batch, jnp.int32(i)) for i in range(0, longest, number)]
            for index, row in zip(indices, np.concatenate(jax.device_get(windows), axis=1), strict=True):
                if index >= 0:
                    sequence = dataset.sequences[index]
                    steps[sequence.task] += _walk(row, len(sequence.ids) - sequence.prompt_length)
        return {task: (round(1 + float(np.mean(taken)), 4), len(taken)) for task, taken in steps.items()}

    def best_params(self):
        """See `trained_params`."""
        return trained_params(self.folder, self.params, self.learner.identity)

    def _out_of_patience(self):
        return self.schedule.patience is not None and self.record.stale >= self.schedule.patience

    def _train_step(self, params, state, frozen, batch, step):
        key = jax.random.fold_in(jax.random.key(self.schedule.seed), step)
        anchors, exists = sample_anchors(key, batch, self.learner.recipe.anchors)

        def loss_of(params):
            outcome = self.learner.outcome(params, frozen, batch, anchors, exists)
            return outcome.loss, outcome

        (loss, outcome), gradient = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, state = self.optimizer.update(gradient, state, params)
        count = outcome.exists.sum()
        tau = 1 + (outcome.accepted * outcome.exists).sum() / jnp.maximum(count, 1)
        return optax.apply_updates(params, updates), state, loss, tau, count * (self.learner.block_size - 1)

    def _evaluate_step(self, params, frozen, batch):
        outcome = self.learner.outcome(params, frozen, batch, *spread_anchors(batch, self.schedule.held_out_anchors))
        return outcome.accepted, outcome.exists

    def _accepted_from(self, params, frozen, batch, offset):
        """Accepted drafts at the `held_out_anchors` anchors from `offset` on, int32 [rows, anchors]."""
        anchors = batch.prompt_lengths[:, None] + offset + jnp.arange(self.schedule.held_out_anchors, dtype=jnp.int32)
        exists = anchors < batch.lengths[:, None] - 1
        return self.learner.outcome(params, frozen, batch, anchors, exists).accepted

    def _batch(self, dataset, indices):
        batch = dataset.batch(indices)
        if batch.features is None:
            batch = batch._replace(features=self.reader(batch.ids).astype(jnp.bfloat16))
        return jax.device_put(batch, self._batch_sharding)

    def _judge(self, began):
        """Evaluate on the held-out sequences; keep the parameters if they are the best so far."""
        figures = self.evaluate(self.held_out)
        self.record.stale += 1
        if figures["tau"] > self.record.best_tau:
            self.record.best_tau, self.record.stale = figures["tau"], 0
            checkpoint.save(self.folder / BEST, self.params, (), dataclasses.asdict(self.record), self.learner.identity)
        seconds = round(self.record.seconds + time.perf_counter() - began, 1)
        self._log({"step": self.record.step, "seconds": seconds, "held_out": figures})
        return figures["tau"]

    def _save(self, began):
        now = time.perf_counter()
        self.record.seconds += now - began
        checkpoint.save(self.folder / CHECKPOINT, self.params, self.state, dataclasses.asdict(self.record), self.learner.identity)
        return now

    def _log(self, entry):
        with (self.folder / LOG).open("a") as file:
            file.write(json.dumps(entry) + "\n")


def trained_params(folder, params, identity):
    """The parameters of the best evaluation in a run's folder, or the last ones where nothing was evaluated.

    Args:
        params, identity: of the draft, see `learner.tensors_of` and `learner.identity_of`.

    Raises:
        ValueError: nothing was trained there, or another draft.
    """
    for name in (BEST, CHECKPOINT):
        if (folder / name).is_file():
            params, _, record = checkpoint.load(folder / name, params, None, identity)
            if record["step"]:
                return params
    raise ValueError(f"folder: nothing has been trained in {folder}; train first.")


def _tau(histogram):
    return round(float(1 + (histogram * np.arange(len(histogram))).sum() / max(histogram.sum(), 1)), 4)


def _walk(accepted, length):
    """Accepted drafts of each step of the loop over a continuation of `length` tokens, its last token counted as a bonus."""
    steps, anchor = [], 0
    while anchor < length - 1:
        steps.append(min(int(accepted[anchor]), length - 2 - anchor))
        anchor += steps[-1] + 1
    return steps


def _truncate_log(file, step):
    """Drop what a killed run logged after its last checkpoint: it is about to be done again."""
    if file.is_file():
        *lines, _ = file.read_text().split("\n")  # behind the last newline: nothing, or half an entry
        scratch = file.with_name("writing-" + file.name)
        scratch.write_text("".join(line + "\n" for line in lines if json.loads(line)["step"] <= step))
        os.replace(scratch, file)


def _shardings(mesh, batch_size):
    """(of a batch, of everything else); (None, None) on one device."""
    if mesh is None:
        return None, None
    if "data" not in mesh.axis_names:
        raise ValueError(f"mesh: axes {mesh.axis_names}; training splits batches over an axis named 'data'.")
    if batch_size % mesh.shape["data"]:
        raise ValueError(f"batch_size: {batch_size} does not divide over the {mesh.shape['data']} devices of axis 'data'; "
                         f"take a multiple.")
    return NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
