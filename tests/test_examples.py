"""Law: four examples run as they are written, on a tiny model; the others tell how they are used.

The others run on SmolLM2, by hand.
"""

import io
import json
import runpy
import sys
from pathlib import Path

import pytest
from safetensors.torch import save_file

from .test_arguments import _tokenizer
from .tiny import random_draft, tiny_target

EXAMPLES = Path(__file__).parents[1] / "examples"
TEMPLATE = "{% for m in messages %}{{ m['content'] + '|' }}{% endfor %}"


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(target folder, draft folder)."""
    target, draft = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("draft")
    model = tiny_target()
    model.save_pretrained(target)
    tokenizer = _tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(target)
    module = random_draft(model)
    save_file(module.state_dict(), draft / "model.safetensors")
    own = {"block_size": 8, "dflash_config": {"mask_token_id": 5, "target_layer_ids": [0, 2]}}
    fields = {**module.config.backbone.to_dict(), **own}
    (draft / "config.json").write_text(json.dumps(fields, default=str))
    return str(target), str(draft)


@pytest.mark.parametrize(("name", "says"), [
    ("quickstart", "tokens per step"), ("batch", "accepted draft tokens"), ("sampling", "the same text twice: True"),
    ("chat", "prompt tokens read"),
])
def test_example(name, says, pair, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--target", pair[0], "--draft", pair[1], "--max-new-tokens", "12"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\nAnd?\n\n"))
    monkeypatch.syspath_prepend(str(EXAMPLES))
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert says in capsys.readouterr().out


@pytest.mark.parametrize("name", ["demo", "train_draft", "multi_chip", "tpu_quickstart"])
def test_example_tells_how_it_is_used(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])  # the last two take no options: anything but 0 or 2 words is explained
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    said = capsys.readouterr().out + str(stop.value.code)
    assert f"python examples/{name}.py" in said or "usage: " in said


def test_every_example_is_tested():
    tested = {"quickstart", "batch", "sampling", "chat", "demo", "train_draft", "multi_chip", "tpu_quickstart"}
    assert {path.stem for path in EXAMPLES.glob("[!_]*.py")} == tested


def test_quickstart_is_short():
    assert len((EXAMPLES / "quickstart.py").read_text().splitlines()) < 40
