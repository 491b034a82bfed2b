"""Laws of the command: one call makes a corpus, a draft and a checkpoint others read; running it again changes nothing."""

import argparse
import json
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config

from dflash_torchax import enabled, last_stats, load_draft
from dflash_torchax.cli import train
from dflash_torchax.training import corpus
from dflash_torchax.training.prompts import PromptSource, held_out, mixed, synthesise

from .tiny import VOCAB

TEMPLATE = "{% for m in messages %}w1 {{ m['content'] }} w2 {% endfor %}{% if add_generation_prompt %}w3 {% endif %}"


def _tokenizer():
    tokens = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokens, unk_token="w0", pad_token="w0", mask_token="w5", chat_template=TEMPLATE)


def _run(*argv):
    parser = argparse.ArgumentParser()
    train.add_parser(parser.add_subparsers())
    args = parser.parse_args(["train", *map(str, argv)])
    return args.run(args)


@pytest.fixture(scope="module")
def target_folder(trained_on, tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    trained_on[0].save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    rows = [json.dumps({"prompt": f"w{6 + i} w{7 + i * 3 % 80} \u2028w{9 + i % 70}"}) for i in range(40)]
    (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    return folder


@pytest.mark.parametrize(("method", "extra"), [
    ("dflash", ("--layers", 1)),
    ("dflash", ("--draft-vocabulary", 60, "--compute-dtype", "bfloat16")),
    ("eagle3", ("--draft-vocabulary", 80, "--taps", 0, 1, 2))], ids=["dflash", "few words", "eagle3"])
def test_one_call_makes_a_draft_and_a_second_changes_nothing(target_folder, tmp_path, method, extra):
    argv = ("--target", target_folder, "--prompts", f"{target_folder}/prompts.jsonl,task=text,hold_out=8", "--out", tmp_path,
            "--method", method, *extra, "--block-size", 4, "--max-new-tokens", 24, "--generate-batch", 8, "--steps", 60,
            "--evaluate-every", 20, "--learning-rate", 5e-3, "--anchors", 8, "--distillation-weight", 0.5)
    assert _run(*argv) == 0
    weights = (tmp_path / method / "draft" / "model.safetensors").read_bytes()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target_folder)
    ids = torch.tensor([[1, 20, 30, 40, 2, 3]])
    expected = model.generate(ids, max_new_tokens=24, do_sample=False)
    with enabled(model, load_draft(tmp_path / method / "draft")):
        assert torch.equal(model.generate(ids, max_new_tokens=24, do_sample=False), expected)
        assert last_stats(model).num_drafted_tokens > 0
    log = [json.loads(line) for line in (tmp_path / method / "log.jsonl").read_text().split("\n") if line]
    assert max(entry["held_out"]["tau"] for entry in log if "held_out" in entry) > 1.2
    assert _run(*argv) == 0
    assert (tmp_path / method / "draft" / "model.safetensors").read_bytes() == weights
    tasks = {sequence.task for _, shard in corpus.read(tmp_path / "corpus") for sequence in shard}
    assert tasks == {"text"}
    if method == "dflash":
        _zlab_reads(tmp_path / method / "draft")
    if "--draft-vocabulary" in extra and method == "dflash":
        assert len(load_draft(tmp_path / method / "draft").vocabulary) == 60
        with pytest.raises(ValueError, match="draft_vocabulary: 50, but the run in .* began with 60 ids"):
            _run(*argv, "--draft-vocabulary", 50)


SHORT = ("--method", "dflash", "--layers", 1, "--block-size", 4, "--max-new-tokens", 12, "--generate-batch", 8, "--anchors", 4)


def test_a_killed_command_goes_on_to_the_same_draft(target_folder, tmp_path):
    def argv(out):
        prompts = f"{target_folder}/prompts.jsonl,hold_out=8"
        return [*map(str, ("--target", target_folder, "--prompts", prompts, "--out", out, *SHORT,
                           "--steps", 400, "--evaluate-every", 200, "--save-every", 10))]

    assert _run(*argv(tmp_path / "whole")) == 0
    checkpoint = tmp_path / "killed" / "dflash" / "checkpoint.safetensors"
    process = subprocess.Popen([sys.executable, "-m", "dflash_torchax", "train", *argv(tmp_path / "killed")],
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not checkpoint.is_file() and process.poll() is None:
        time.sleep(0.02)
    process.kill()
    process.wait()
    with safe_open(checkpoint, framework="numpy") as saved:
        assert 0 < json.loads(saved.metadata()["record"])["step"] < 400
    assert _run(*argv(tmp_path / "killed")) == 0
    for name in ("draft/model.safetensors", "draft/config.json"):
        assert (tmp_path / "killed/dflash" / name).read_bytes() == (tmp_path / "whole/dflash" / name).read_bytes()


def test_what_minutes_cut_short_leaves_no_draft(target_folder, tmp_path, capsys):
    argv = ("--target", target_folder, "--prompts", f"{target_folder}/prompts.jsonl,hold_out=8", "--out", tmp_path, *SHORT,
            "--draft-vocabulary", 40, "--steps", 2)
    assert _run(*argv, "--minutes", 0) == 0
    assert "the corpus is not whole; run the same command again" in capsys.readouterr().out
    assert not (tmp_path / "dflash").exists(), "the ids of a part of the corpus must not be kept"
    assert _run(*argv, "--stage", "generate") == 0
    for feature in tmp_path.glob("*/taps-*/*"):
        feature.unlink()
    assert _run(*argv, "--minutes", 0, "--stage", "train") == 0
    assert "hidden states of the corpus are not all there" in capsys.readouterr().out
    with pytest.raises(ValueError, match="nothing has been trained"):
        _run(*argv, "--stage", "export")
    assert _run(*argv) == 0
    assert "tau of the loop on held-out prompts: prompts " in capsys.readouterr().out
    with pytest.raises(ValueError, match="draft_vocabulary: None, but .* was trained with 40 ids"):
        _run(*[arg for arg in argv if arg not in ("--draft-vocabulary", 40)], "--stage", "export")
    assert len(load_draft(tmp_path / "dflash" / "draft").vocabulary) == 40


@pytest.mark.parametrize("options", [
    ("--method", "eagle3", "--layers", "2"), ("--method", "eagle3", "--mask-token-id", "5"),
    ("--method", "eagle3", "--regression-weight", "1"), ("--method", "eagle3", "--whole-vocabulary"),
    ("--draft-vocabulary", "9", "--whole-vocabulary")])
def test_options_that_mean_nothing_together_are_refused(tmp_path, options):
    with pytest.raises(ValueError, match=f"{options[2]}: given, but"):
        _run("--target", "nowhere", "--out", tmp_path / "run", *options)
    assert not (tmp_path / "run").exists()


def test_the_example_trains_a_draft_and_uses_it(target_folder, tmp_path, capsys, monkeypatch):
    options = ("--prompts", f"{target_folder}/prompts.jsonl", "--target", target_folder, "--out", tmp_path, "--steps", 3)
    monkeypatch.setattr(sys, "argv", ["train_draft.py", *map(str, options)])
    with pytest.raises(SystemExit):
        runpy.run_path(str(Path(__file__).parents[1] / "examples" / "train_draft.py"), run_name="__main__")
    assert "--mask-token-id" in capsys.readouterr().err
    sys.argv += ["--mask-token-id", "5"]
    runpy.run_path(str(Path(__file__).parents[1] / "examples" / "train_draft.py"), run_name="__main__")
    assert "on a prompt it has not seen" in capsys.readouterr().out
    load_draft(tmp_path / "dflash" / "draft")


def test_init_fixes_what_a_draft_was_trained_with_and_no_more(target_folder, tmp_path):
    model = torch.nn.Module()
    argv = {"init": str(tmp_path / "draft"), "method": "dflash", "taps": None, "mask_token_id": None, "layers": 3, "block_size": 5}
    from .checkpoints import save_draft
    from .tiny import tiny_target

    save_draft(tmp_path / "draft", tiny_target())
    draft = train._draft(argparse.Namespace(**argv), model, None)
    assert (draft.config.block_size, len(draft.layers)) == (5, 3)
    for option, value in (("taps", [1, 2]), ("mask_token_id", 4)):
        with pytest.raises(ValueError, match="leave --init out"):
            train._draft(argparse.Namespace(**{**argv, option: value}), model, None)
    with pytest.raises(ValueError, match="--method: eagle3, but --init .* is for dflash"):
        train._draft(argparse.Namespace(**{**argv, "method": "eagle3"}), model, None)


@pytest.mark.parametrize("option", ["--block-size", "--layers", "--draft-vocabulary", "--save-every", "--batch-size", "--devices"])
def test_nought_is_no_size(option, capsys):
    with pytest.raises(SystemExit):
        _run("--target", "embedded", "--out", "run", option, 0)
    assert option in capsys.readouterr().err


def _zlab_reads(folder):
    """PyPI dflash builds from the exported config and takes every tensor."""
    zlab = pytest.importorskip("dflash.model", reason="PyPI dflash is not installed")
    twin = zlab.DFlashDraftModel(Qwen3Config(**json.loads((folder / "config.json").read_text()), attn_implementation="sdpa"))
    missing, unexpected = twin.load_state_dict(load_draft(folder).state_dict(), strict=False)
    assert not unexpected
    assert all("rotary" in name for name in missing)


def test_held_out_prompts_are_never_trained_on(target_folder):
    source = PromptSource.parse(f"{target_folder}/prompts.jsonl,task=text,hold_out=8,share=2")
    other = PromptSource.parse(f"{target_folder}/prompts.jsonl,task=other,hold_out=30")
    train_on = [prompt for task, prompt in mixed([source], seed=1) if task == "text"]
    held = [prompt for _, prompt in held_out([source])]
    assert (len(train_on), len(held)) == (32, 8)
    assert not set(train_on) & set(held)
    tasks = [task for task, _ in mixed([source, other], seed=1, limit=15)]
    assert tasks.count("text") == 10, "any prefix holds the tasks in their shares"
    with pytest.raises(ValueError, match="hold_out"):
        PromptSource(source.path, hold_out=40).read()
    with pytest.raises(ValueError, match="unknown option 'weight'"):
        PromptSource.parse("a.jsonl,weight=3")
    with pytest.raises(ValueError, match="share=0"):
        PromptSource.parse("a.jsonl,share=0")
    with pytest.raises(ValueError, match="config=main of a.jsonl, which is a file"):
        PromptSource.parse("a.jsonl,config=main")


def test_the_target_writes_its_own_prompts_reproducibly(trained_on, tmp_path):
    model, tokenizer = trained_on[0], _tokenizer()
    first, again = (synthesise(model, tokenizer, 12, tmp_path / name, batch_size=5, max_new_tokens=6).read() for name in "ab")
    assert [len(part) for part in first] == [11, 1], "some are held out, to judge by"
    assert first == again


def test_a_target_that_writes_no_prompts_is_an_error(tmp_path):
    silent = argparse.Namespace(generate=lambda ids, **_: torch.nn.functional.pad(ids, (0, 2)))
    tokenizer = _tokenizer()
    tokenizer.batch_decode = lambda ids, **_: [" "] * len(ids)
    with pytest.raises(ValueError, match="synthesise: 3, but in 8 batches"):
        synthesise(silent, tokenizer, 3, tmp_path, batch_size=2)


MESH = """
import jax, numpy as np, pathlib, sys
from jax.sharding import Mesh
from tests.training_cases import LAYERS, training_batch
from tests.tiny import random_draft, tiny_target
from dflash_torchax.training.blocks import DFlashLearner
from dflash_torchax.training.learner import Recipe
from dflash_torchax.training.losses import LossWeights
from dflash_torchax.training.trainer import Schedule, Trainer

model = tiny_target()
target, params, batch = training_batch(model, (0, 2, 3))
batch = type(batch)(*(np.concatenate([np.asarray(x)] * 2) for x in batch))

class Repeated:
    tasks = ("text",)
    batch = lambda self, indices: batch
    indices_at = lambda self, step, rows, seed: [0, 1, 2, 3]

def train(mesh, folder):
    learner = DFlashLearner(random_draft(model, block_size=4), target, Recipe(5, 3.0, LossWeights(1.0, 0.5, 0.1)))
    trainer = Trainer(learner, params, Schedule(steps=3, batch_size=4, learning_rate=1e-2), Repeated(), None, folder, mesh=mesh)
    trainer.fit(progress=False)
    return trainer.params

assert len(jax.devices()) == 4
alone = train(None, sys.argv[1] + "/a")
split = train(Mesh(np.array(jax.devices()), ("data",)), sys.argv[1] + "/b")
for name in alone:
    assert len(split[name].sharding.device_set) == 4
    np.testing.assert_allclose(alone[name], split[name], atol=2e-4, err_msg=name)
try:
    train(Mesh(np.array(jax.devices()[:3]), ("data",)), sys.argv[1] + "/c")
except ValueError as error:
    assert "does not divide" in str(error)
else:
    raise AssertionError("a batch of 4 on 3 devices must be refused")
"""


def test_a_data_parallel_mesh_trains_to_the_same_parameters(tmp_path):
    import os

    root = Path(__file__).parents[1]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
                                "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", MESH, str(tmp_path)], env=environment, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr[-3000:]
