"""`dflash-torchax train`: a draft for any target, from prompts to a checkpoint, resumable at every stage."""

import argparse
import sys
import time

from . import pair

_BLOCK_SIZE, _EAGLE3_ROWS = 8, 4096
STAGES = ("generate", "train", "export")
_EPILOG = """\
examples:
  dflash-torchax train --target embedded --prompts math.jsonl,hold_out=100 --out run
  dflash-torchax train --target embedded --prompts math.jsonl,share=6,hold_out=100 --prompts code.jsonl,share=3 --out run \\
      --init my-draft --distillation-weight 0.5 --tokens-weight 0.5 --minutes 30        (again: goes on)
  dflash-torchax train --target embedded --out run --init run/dflash/draft --name longer --block-size 16 --learning-rate 3e-4
  dflash-torchax train --target Qwen/Qwen3-4B --prompts hf:openai/gsm8k,config=main,field=question --out run --mask-token-id 151669
  dflash-torchax train --target embedded --out run --method eagle3 --block-size 4 --stage train --stage export
"""


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults in the help, examples as written."""


def add_parser(subparsers):
    """Register the command."""
    parser = subparsers.add_parser(
        "train", help="train a DFlash or EAGLE-3 draft for a target",
        description="Generate the target's own continuations of prompts, train a draft on them, export it. "
                    "Run the same command again to resume.",
        epilog=_EPILOG, formatter_class=_Formatter)
    parser.add_argument("--target", required=True, help="folder or repo id of the target, or 'embedded'")
    parser.add_argument("--out", required=True, help="folder of the run")
    parser.add_argument("--prompts", action="append", default=[],
                        metavar="PATH[,task=NAME][,share=S][,hold_out=N][,field=KEY][,config=NAME]",
                        help="JSONL file or hf:owner/name[:split]; repeat to mix several")
    parser.add_argument("--synthesise", type=pair.positive, metavar="N", help="let the target write N prompts itself")
    parser.add_argument("--method", choices=("dflash", "eagle3"), default="dflash")
    parser.add_argument("--name", help="folder of the training inside --out, one for each; the method's name by default")
    parser.add_argument("--stage", action="append", choices=STAGES, help="stages to run; all of them by default")
    parser.add_argument("--minutes", type=float, help="stop after that long, at the next shard or step")
    parser.add_argument("--seed", type=int, default=0)
    _add_corpus(parser.add_argument_group("corpus"))
    _add_draft(parser.add_argument_group("draft"))
    _add_training(parser.add_argument_group("training"))
    parser.set_defaults(run=run)
    return parser


def _add_corpus(group):
    group.add_argument("--sequences", type=pair.positive, help="prompts to continue at most; all by default")
    group.add_argument("--held-out", type=pair.positive, default=64,
                       help="held-out prompts per source at most (see hold_out of --prompts)")
    group.add_argument("--max-new-tokens", type=pair.positive, default=128)
    group.add_argument("--max-prompt-tokens", type=pair.positive, default=512)
    group.add_argument("--generate-batch", type=pair.positive, default=32, help="rows per batch of generation")
    group.add_argument("--temperature", type=float, default=0.0, help="of the continuations; 0 is greedy")
    group.add_argument("--format", choices=("safetensors", "jsonl"), default="safetensors", help="of the shards")


def _add_draft(group):
    group.add_argument("--init", help="draft to start from; by default a new one initialised from the target's last layers")
    group.add_argument("--block-size", type=pair.positive, help="anchor and drafted tokens; 8, or what --init was trained for")
    group.add_argument("--layers", type=pair.positive, help="depth of a DFlash draft, 2 for a new one; --init grows to it")
    group.add_argument("--taps", type=int, nargs="+", help="target layers to read, 0-based")
    group.add_argument("--mask-token-id", type=int, help="fills a DFlash block; the tokenizer's last special token by default")
    group.add_argument("--draft-vocabulary", type=pair.positive, metavar="N",
                       help=f"guess among the N most frequent ids of the corpus; EAGLE-3: {_EAGLE3_ROWS}, DFlash: all")


def _add_training(group):
    group.add_argument("--epochs", type=float, default=6.0)
    group.add_argument("--steps", type=pair.positive, help="optimizer steps; overrides --epochs")
    group.add_argument("--batch-size", type=pair.positive, default=8, help="sequences per step")
    group.add_argument("--anchors", type=pair.positive, default=32, help="blocks per sequence and step")
    group.add_argument("--learning-rate", type=float, default=6e-4)
    group.add_argument("--gamma", type=float, help="decay of the position weights; the paper's for the block size by default")
    group.add_argument("--tokens-weight", type=float, default=1.0, help="cross-entropy on the target's tokens")
    group.add_argument("--distillation-weight", type=float, default=0.0, help="cross-entropy on the target's distribution")
    group.add_argument("--regression-weight", type=float, default=0.0, help="distance to the target's final hidden state (DFlash)")
    group.add_argument("--whole-vocabulary", action="store_true", help="train on all logits, not only those of ids in the corpus")
    group.add_argument("--recompute-taps", action="store_true", help="run the target at every step, keep no hidden states")
    group.add_argument("--compute-dtype", choices=("float32", "bfloat16"), default="float32")
    group.add_argument("--devices", type=pair.positive, help="devices to split batches over")
    group.add_argument("--evaluate-every", type=pair.positive, default=100)
    group.add_argument("--save-every", type=pair.positive, default=100)
    group.add_argument("--patience", type=pair.positive, help="evaluations without a better held-out tau before stopping")


def run(args):
    """Run the stages asked for; returns the exit code."""
    from ..training import run as training

    _check_options(args)
    stages, began = args.stage or STAGES, time.monotonic()
    stop = lambda: args.minutes is not None and time.monotonic() - began > 60 * args.minutes
    model, tokenizer = _load_target(args.target)
    draft = _draft(args, model, tokenizer) if args.method == "dflash" or args.init else None
    layers = () if args.recompute_taps else _layers(args, draft, model)
    if "generate" in stages and not _generate(args, model, tokenizer, layers, stop):
        return _out_of_time("the corpus is not whole")
    if not {"train", "export"} & set(stages):
        return 0
    draft = _with_vocabulary(args, model, draft)
    if "train" in stages:
        trainer = _trainer(args, model, draft, stop)
        if trainer is None:
            return _out_of_time("the hidden states of the corpus are not all there")
        _train(trainer, stop)
        if not trainer.record.step:
            return _out_of_time("nothing was trained")
    if "export" in stages:
        run = training.run_folder(args.out, draft, args.name)
        print(f"exported to {training.export(draft, run)}")
    return 0


def _out_of_time(left):
    print(f"--minutes are over: {left}; run the same command again to go on.")
    return 0


def _check_options(args):
    """Refuse what another option makes meaningless, before anything is made."""
    eagle3 = args.method == "eagle3"
    meaningless = {
        "--layers": (args.layers is not None and eagle3, "an EAGLE-3 head has one layer"),
        "--mask-token-id": (args.mask_token_id is not None and eagle3, "EAGLE-3 drafts without masks"),
        "--regression-weight": (args.regression_weight and eagle3, "an EAGLE-3 head's hidden states are not the target's"),
        "--whole-vocabulary": (args.whole_vocabulary and (eagle3 or args.draft_vocabulary), "the draft has its own vocabulary"),
    }
    for option, (given, why) in meaningless.items():
        if given:
            raise ValueError(f"{option}: given, but {why}; leave it out.")


def _train(trainer, stop):
    """Train on; say where the run stands, and what the draft is worth on the held-out prompts."""
    record = trainer.fit(stop=stop)
    print(f"step {record.step} of {trainer.schedule.steps}, best held-out tau {record.best_tau:.3f}, {record.seconds / 60:.1f} min")
    if trainer.held_out is not None and record.step == trainer.schedule.steps:
        taus = trainer.loop_tau(trainer.held_out, trainer.best_params()).items()
        print("tau of the loop on held-out prompts: " + ", ".join(f"{task} {tau:.3f} ({n} steps)" for task, (tau, n) in taus))


def _load_target(name):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if name == "embedded":
        from ..embedded import embedded_target_folder

        name = embedded_target_folder()
    return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32), AutoTokenizer.from_pretrained(name)


def _draft(args, model, tokenizer):
    """The DFlash draft (new or loaded), or a loaded EAGLE-3 one."""
    from ..loading import load_draft
    from ..training.initial import new_dflash

    if args.init:
        return _continued(load_draft(args.init), args)
    mask = args.mask_token_id
    if mask is None:
        rows = model.get_input_embeddings().weight.shape[0]
        mask = max((i for i in tokenizer.all_special_ids if i < rows), default=rows - 1)
        print(f"mask token: {mask} ({tokenizer.convert_ids_to_tokens(mask)})", file=sys.stderr)
    return new_dflash(model, block_size=args.block_size or _BLOCK_SIZE, mask_token_id=mask, layers=args.layers or 2,
                      taps=args.taps, seed=args.seed)


def _continued(draft, args):
    """The draft of --init with the block size and depth asked for; what it fixes cannot be asked for."""
    import dataclasses

    from ..training.initial import deepened
    from ..training.run import is_eagle3

    found = "eagle3" if is_eagle3(draft) else "dflash"
    if found != args.method:
        raise ValueError(f"--method: {args.method}, but --init {args.init} is for {found}; say --method {found}.")
    for option in ("taps", "mask_token_id"):
        if getattr(args, option) is not None:
            raise ValueError(f"--{option.replace('_', '-')}: {getattr(args, option)}, but the draft of --init was trained with "
                             f"its own; leave it out, or leave --init out for a new draft.")
    draft = deepened(draft, args.layers)
    if args.block_size is not None:
        draft.config = dataclasses.replace(draft.config, block_size=args.block_size)
    return draft


def _with_vocabulary(args, model, draft):
    """What needs the corpus: a new EAGLE-3 draft, or the ids a DFlash draft is to guess among."""
    import torch

    from ..training.initial import new_eagle3
    from ..training.run import draft_vocabulary, is_eagle3

    count = args.draft_vocabulary
    if draft is not None and count is None:
        return draft
    if draft is not None and is_eagle3(draft):
        raise ValueError(f"--draft-vocabulary: {count}, but the EAGLE-3 draft of --init has its own head; leave it out.")
    ids = draft_vocabulary(args.out, args.name or args.method, model, count or _EAGLE3_ROWS)
    if draft is None:
        return new_eagle3(model, block_size=args.block_size or _BLOCK_SIZE, vocabulary=ids, taps=args.taps, seed=args.seed)
    draft.vocabulary = torch.from_numpy(ids).long()
    return draft


def _layers(args, draft, model):
    from ..eagle3_model import usual_taps
    from ..training.run import layers_of

    if draft is not None:
        return layers_of(draft, model)
    depth = model.config.get_text_config(decoder=True).num_hidden_layers
    return (*(args.taps or usual_taps(depth)), depth - 1)


def _generate(args, model, tokenizer, layers, stop):
    from tqdm import tqdm

    from ..training import run as training
    from ..training.prompts import PromptSource, synthesise

    sources = [PromptSource.parse(text) for text in args.prompts]
    if args.synthesise:
        sources.append(synthesise(model, tokenizer, args.synthesise, args.out, seed=args.seed))
    if not sources:
        raise ValueError("--prompts: none given; name a JSONL file or hf:owner/name, or use --synthesise N.")
    options = training.CorpusOptions(args.sequences, args.held_out, args.max_new_tokens, args.max_prompt_tokens,
                                     args.generate_batch, args.format, args.temperature, args.seed)
    with tqdm(unit="token", desc="generate", dynamic_ncols=True, disable=None) as bar:
        def on_shard(done, total, tokens):
            bar.set_postfix({"shard": f"{done}/{total}"}, refresh=False)
            bar.update(tokens)

        return training.generate_corpora(model, tokenizer, sources, args.out, options, layers=layers, target=args.target,
                                         on_shard=on_shard, stop=stop)


def _trainer(args, model, draft, stop):
    from ..training import run as training
    from ..training.losses import LossWeights
    from ..training.trainer import Schedule

    count = len(training.continuations(args.out))
    schedule = Schedule(
        steps=args.steps or max(1, round(args.epochs * count / args.batch_size)), batch_size=args.batch_size,
        learning_rate=args.learning_rate, seed=args.seed, evaluate_every=args.evaluate_every, save_every=args.save_every,
        patience=args.patience)
    losses = LossWeights(args.tokens_weight, args.distillation_weight, args.regression_weight)
    options = training.LearnOptions(args.anchors, args.gamma, losses, not args.whole_vocabulary, not args.recompute_taps,
                                    args.compute_dtype, args.devices)
    return training.make_trainer(model, draft, args.out, schedule, options, name=args.name or args.method, stop=stop,
                                 on_shard=lambda file: print(f"hidden states of {file.name}", file=sys.stderr))
