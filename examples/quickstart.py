"""The drop-in: two lines make an HF model's own generate() fast; the output stays the same, token for token."""

import argparse

import dflash_torchax as dflash

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--target", help="HF model folder or repo; default: the embedded SmolLM2-135M-Instruct")
parser.add_argument("--draft", help="DFlash draft folder or repo for that target")
parser.add_argument("--prompt", default="A bag has 3 red and 5 blue marbles. I add 4 red ones. How many marbles are red?")
parser.add_argument("--max-new-tokens", type=int, default=96)
args = parser.parse_args()

if args.target:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(args.target)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    draft = dflash.load_draft(args.draft) if args.draft else None
else:
    model, draft, tokenizer = dflash.load_embedded()

dflash.enable(model, draft)

messages = [{"role": "user", "content": args.prompt}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
output = model.generate(**inputs, max_new_tokens=args.max_new_tokens, do_sample=False)

print(tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True))
stats = dflash.last_stats(model)
print(f"\n{stats.num_steps} steps, {stats.acceptance_length:.2f} tokens per step")
