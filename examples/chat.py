"""A streaming chat in the terminal: blocks appear as they are committed, and each turn reads only its new tokens."""

import argparse

from _pair import add_pair_arguments, load_pair
from transformers import TextStreamer

import dflash_torchax as dflash

parser = argparse.ArgumentParser(description=__doc__)
add_pair_arguments(parser)
args = parser.parse_args()
model, draft, tokenizer = load_pair(args)
dflash.enable(model, draft)

messages, cache = [], None
print("An empty line ends the chat.")
while True:
    try:
        question = input("\n> ")
    except EOFError:
        break
    if not question.strip():
        break
    messages.append({"role": "user", "content": question})
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(
        **inputs, max_new_tokens=args.max_new_tokens, do_sample=False, cache=cache, return_dict_in_generate=True,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
    )
    cache = output.cache
    reply = tokenizer.decode(output.sequences[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    messages.append({"role": "assistant", "content": reply})
    print(f"[{output.stats.num_prefill_tokens} prompt tokens read, {output.stats.acceptance_length:.2f} tokens per step]")
