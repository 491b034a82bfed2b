"""On a TPU VM: enable DFlash on a Hugging Face model and generate. Also runs on a CPU, with the embedded pair.

python examples/tpu_quickstart.py                                             # embedded SmolLM2 pair
python examples/tpu_quickstart.py Qwen/Qwen3-4B z-lab/Qwen3-4B-DFlash-b16     # on a TPU
"""

import sys
import time

import jax
import torch
from transformers import AutoTokenizer

from dflash_torchax import enable, last_stats, load_draft, load_embedded, load_target

PROMPT = "Natalia sold 48 clips in April and half as many in May. How many did she sell altogether?"


def load(names):
    """(target, draft, tokenizer): the two given checkpoints, or the embedded pair."""
    if not names:
        return load_embedded()
    target, draft = names
    # Weights go from the file straight to the device: the host never holds a second copy.
    return load_target(target, dtype=torch.bfloat16), load_draft(draft), AutoTokenizer.from_pretrained(target)


def main():
    if len(sys.argv) not in (1, 3):
        sys.exit(__doc__)
    model, draft, tokenizer = load(sys.argv[1:])
    enable(model, draft, max_length=1024)  # one cache length: the second call compiles nothing
    messages = [{"role": "user", "content": PROMPT}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    for run in ("first call, compiling", "second call"):
        begin = time.perf_counter()
        output = model.generate(**inputs, max_new_tokens=128, do_sample=False)
        seconds = time.perf_counter() - begin
        new = output.shape[1] - inputs["input_ids"].shape[1]
        tau, device = last_stats(model).acceptance_length, jax.devices()[0].device_kind
        print(f"{run}: {new} tokens in {seconds:.2f} s, tau {tau:.2f}, on {device}")
    print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


if __name__ == "__main__":
    main()
