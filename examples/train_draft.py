"""Train a DFlash draft for a target on its own continuations, and see what it accepts.

    python examples/train_draft.py --prompts questions.jsonl --out my-draft
    python examples/train_draft.py --prompts questions.jsonl --out my-draft      # again: resumes, or trains nothing

Each line of the JSONL file is {"prompt": "..."}; the last 32 are held out. Without --target the embedded SmolLM2 is used.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash_torchax import enabled, last_stats, load_draft
from dflash_torchax.embedded import embedded_target_folder
from dflash_torchax.training.initial import new_dflash
from dflash_torchax.training.losses import LossWeights
from dflash_torchax.training.prompts import PromptSource, encode, held_out
from dflash_torchax.training.run import CorpusOptions, LearnOptions, export, generate_corpora, layers_of, make_trainer
from dflash_torchax.training.trainer import Schedule

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--prompts", required=True)
parser.add_argument("--out", required=True)
parser.add_argument("--target", help="folder or repo id")
parser.add_argument("--mask-token-id", type=int, help="an id the target's text does not use; needed with --target")
parser.add_argument("--sequences", type=int, default=1024)
parser.add_argument("--steps", type=int, default=1000)
args = parser.parse_args()
if args.mask_token_id is None:
    args.mask_token_id = parser.error("--mask-token-id: missing") if args.target else 5  # SmolLM2's <file_sep>

folder = args.target or embedded_target_folder()
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(folder)
source = PromptSource(args.prompts, hold_out=32)

draft = new_dflash(model, block_size=8, mask_token_id=args.mask_token_id)
generate_corpora(model, tokenizer, [source], args.out, CorpusOptions(sequences=args.sequences), layers=layers_of(draft, model),
                 on_shard=lambda done, total, tokens: print(f"shard {done} of {total}: {tokens} tokens"))

options = LearnOptions(losses=LossWeights(tokens=0.5, distillation=0.5))
trainer = make_trainer(model, draft, args.out, Schedule(steps=args.steps, patience=5), options)
print(trainer.fit())
checkpoint = export(draft, trainer.folder)

_, prompt = held_out([source])[0]
with enabled(model, load_draft(checkpoint)):
    model.generate(torch.tensor([encode(tokenizer, prompt)]), max_new_tokens=128, do_sample=False)
    print(f"{checkpoint}: tau {last_stats(model).acceptance_length:.2f} on a prompt it has not seen")
