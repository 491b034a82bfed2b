"""Several chips: one mesh argument shards target, draft, caches and batch. On a CPU it makes four virtual devices.

python examples/multi_chip.py                                                              # four virtual CPU devices
python examples/multi_chip.py meta-llama/Llama-3.1-8B-Instruct z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat   # on a TPU host
"""

import os
import sys

if len(sys.argv) == 1:  # before jax starts
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"

import jax
import torch
from transformers import AutoTokenizer

from dflash_torchax import enable, last_stats, load_draft, load_target
from dflash_torchax.embedded import DRAFT_FOLDER, embedded_target_folder

PROMPTS = ["What is 12 * 7?", "Name three fruits."]


def main():
    if len(sys.argv) not in (1, 3):
        sys.exit(__doc__)
    target, draft = sys.argv[1:] or (embedded_target_folder(), DRAFT_FOLDER)
    # Rows are split over "data"; heads, ffn and vocabulary over every other axis.
    shape = (2, 2) if len(sys.argv) == 1 else (1, jax.device_count())
    mesh = jax.make_mesh(shape, ("data", "model"))
    model = load_target(target, dtype=torch.float32 if len(sys.argv) == 1 else torch.bfloat16, mesh=mesh)
    enable(model, load_draft(draft), max_length=512, mesh=mesh)

    tokenizer = AutoTokenizer.from_pretrained(target, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    inputs = tokenizer.apply_chat_template(chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=32, do_sample=False)

    params = model.generate.engine.params
    for name in ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        print(f"{name}: {params.target[name].shape} split as {params.target[name].sharding.spec}")
    print(f"{len(jax.devices())} devices, tau {last_stats(model).acceptance_length:.2f}")
    for text in tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True):
        print("-", text.replace("\n", " "))


if __name__ == "__main__":
    main()
