"""Sampling keeps the target's distribution; with greedy proposals and one seed the text does not depend on the block size."""

import argparse

import torch
from _pair import add_pair_arguments, load_pair

import dflash_torchax as dflash

parser = argparse.ArgumentParser(description=__doc__)
add_pair_arguments(parser)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()
model, draft, tokenizer = load_pair(args)

messages = [{"role": "user", "content": "Tell me a very short story about a lighthouse."}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
options = {"max_new_tokens": args.max_new_tokens, "do_sample": True, "temperature": 0.8, "top_p": 0.95, "top_k": 0}

texts = []
for block_size in (None, 4):
    dflash.enable(model, draft, block_size=block_size, draft_sampling="greedy")
    torch.manual_seed(args.seed)
    output = model.generate(**inputs, **options, repetition_penalty=1.1)
    texts.append(tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True))
    print(f"block size {block_size or 'of the draft'}: {dflash.last_stats(model).acceptance_length:.2f} tokens per step")
print(f"\n{texts[0]}\n\nthe same text twice: {texts[0] == texts[1]}")
