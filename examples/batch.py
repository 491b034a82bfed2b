"""A left-padded batch of unequal prompts: each row has its own accepted counts, and equals the row alone."""

import argparse

from _pair import add_pair_arguments, load_pair

import dflash_torchax as dflash

parser = argparse.ArgumentParser(description=__doc__)
add_pair_arguments(parser)
args = parser.parse_args()
model, draft, tokenizer = load_pair(args)

questions = ["What is 17 + 25?", "Tom has 3 boxes with 12 pencils each. How many pencils does he have?", "Name three primes."]
messages = [[{"role": "user", "content": question}] for question in questions]
tokenizer.padding_side = "left"
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True)

dflash.enable(model, draft)
output = model.generate(**inputs, max_new_tokens=args.max_new_tokens, do_sample=False)
for question, row in zip(questions, output[:, inputs.input_ids.shape[1] :], strict=True):
    print(f"> {question}\n{tokenizer.decode(row, skip_special_tokens=True)}\n")
print("accepted draft tokens per step and row:", *dflash.last_stats(model).accepted_per_step, sep="\n")
