"""Laws of saved programs: they run where a call is the one they were made for, and are refused or left alone elsewhere."""

import copy
from pathlib import Path

import jax
import pytest
import torch

from dflash_torchax.aot.programs import Compiler, Shape, abstract_target

from .tiny import random_draft, tiny_target

SAVE_AND_LOAD = """
import json, tempfile
from pathlib import Path
import torch
from dflash_torchax import enable
from dflash_torchax.aot.executables import save_executable, use_executables
from tests.tiny import random_draft, tiny_target

folder = Path(tempfile.mkdtemp())
model = tiny_target(num_hidden_layers=2)
draft = random_draft(model, taps=(0, 1), layers=1)
ids = torch.tensor([[7, 8, 9]])
CALLS = {"greedy": {"do_sample": False}, "kept": {"do_sample": False, "return_dict_in_generate": True},
         "sampled": {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}}

def fresh(draft=draft):
    return enable(model, draft, cache="paged").generate.engine

def say(name):
    return model.generate(ids, max_new_tokens=17, pad_token_id=0, generator=torch.Generator().manual_seed(3), **CALLS[name])

def saving(engine, name):
    function = getattr(engine, name)
    def call(*args, **kwargs):
        compiled = function.lower(*args, **kwargs).compile()
        save_executable(compiled, args, kwargs, folder, name, engine)
        return compiled(*args)
    setattr(engine, name, call)

engine = fresh()
for name in ("prefill", "decode_loop"):
    saving(engine, name)
expected = say("greedy")
(folder / "decode_loop-0.xla").write_bytes(b"cut off")  # one without its facts is no program

other = fresh()
use_executables(other, folder)
dispatches = other.prefill, other.decode_loop
assert torch.equal(say("greedy"), expected)
for dispatch in dispatches:
    assert all(executable is not None for executable in dispatch.loaded.values())
    assert dispatch.function._cache_size() == 0
# Calls that differ in static values only are compiled.
kept = say("kept")
assert torch.equal(kept.sequences, expected)
assert (kept.cache.caches[0].held > 0).all(), "its pages were not given back"
assert [list(dispatch.loaded.values()).count(None) for dispatch in dispatches] == [1, 1]

class Compiles(Exception):
    pass

def compiles(*args, **kwargs):
    raise Compiles

other.prefill.function = compiles
try:
    say("sampled")
    raise AssertionError("the greedy program ran")
except Compiles:
    pass

def refused(message, draft=draft):
    try:
        use_executables(fresh(draft), folder)
    except ValueError as error:
        assert message in str(error), error
        return True

changed = random_draft(model, taps=(0, 1), layers=1)
object.__setattr__(changed.config, "mask_token_id", 6)
assert refused("was compiled for draft.mask_token_id 5, but this engine has draft.mask_token_id 6;", changed)
assert refused("draft.target_layer_ids [0, 1], but this engine has draft.target_layer_ids [1, 0];",
               random_draft(model, taps=(1, 0), layers=1))
facts = next(folder.glob("*.json"))
facts.write_text(json.dumps({**json.loads(facts.read_text()), "device_kind": "TPU v5"}))
assert refused("compiled for device_kind 'TPU v5', this machine has")
print("same")
"""


def test_saved_programs_run_without_compiling_and_a_wrong_platform_is_refused():
    """In a process without XLA's cache: XLA:CPU cannot save again what came out of it."""
    from .test_mesh import run_with_devices

    run_with_devices(SAVE_AND_LOAD, devices=1, DFLASH_TORCHAX_COMPILATION_CACHE="0", JAX_COMPILATION_CACHE_DIR="")


def test_a_folder_without_programs_is_refused_by_name(tmp_path):
    from dflash_torchax.aot.executables import use_executables

    with pytest.raises(FileNotFoundError, match="holds no saved program"):
        use_executables(None, tmp_path)


def test_programs_saved_from_configs_are_those_that_generate_looks_for():
    from dflash_torchax import enable
    from dflash_torchax.aot.executables import signature
    from dflash_torchax.aot.fingerprint import fingerprint_of

    model = tiny_target(num_hidden_layers=2)
    draft = random_draft(model, taps=(0, 1), layers=1)
    mesh = jax.make_mesh((1, 1), ("data", "model"), devices=jax.devices()[:1])
    on_meta = abstract_target({**model.config.to_dict(), "dtype": "float32"}), copy.deepcopy(draft).to("meta")
    compiler = Compiler(*on_meta, mesh, Shape(context=64, as_served=True), "paged")
    pair, wanted = fingerprint_of(compiler.engine), {}
    args, static = compiler._prompt(compiler.engine, 32)
    saved = {"prefill": signature(args, static, pair),
             "decode_loop": signature((compiler.engine.params, compiler.state(compiler.engine)), {}, pair)}
    engine = enable(model, draft, max_length=64, cache="paged", mesh=mesh).generate.engine

    def noting(name, function):
        def call(*args, **kwargs):
            wanted[name] = signature(args, kwargs, fingerprint_of(engine))
            return function(*args, **kwargs)
        return call

    for name in saved:
        setattr(engine, name, noting(name, getattr(engine, name)))
    model.generate(torch.tensor([[7, 8, 9]]), max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert wanted == saved


def test_an_interrupted_save_leaves_no_program(tmp_path, monkeypatch):
    from dflash_torchax.aot import executables

    def interrupted(path, content, write=Path.write_bytes):
        write(path, content[:1])
        if ".xla" in path.name:
            raise KeyboardInterrupt

    monkeypatch.setattr(executables.serialize_executable, "serialize", lambda compiled: (b"program", None, None))
    monkeypatch.setattr(executables, "fingerprint_of", lambda engine: {})
    monkeypatch.setattr(executables, "_devices_of", lambda engine: jax.devices()[:1])
    monkeypatch.setattr(Path, "write_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        executables.save_executable(None, (), {}, tmp_path, "prefill", None)
    assert [file.suffix for file in tmp_path.iterdir()] == [".json"]


def test_programs_with_a_stand_in_mask_id_are_not_saved(tmp_path, capsys):
    from dflash_torchax.cli import main

    assert main(["compile", "--preset", "llama3.1-8b", "--save", str(tmp_path / "programs")]) == 1
    assert "--save: the preset llama3.1-8b has a stand-in for its draft's mask id" in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())
