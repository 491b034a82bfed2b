"""Law: a command gives its result on stdout or one line on stderr and an exit code, and nothing else."""

import contextlib
import io
import json
from types import SimpleNamespace

import pytest
import torch

from dflash_torchax.cli import COMMANDS, chat, main, output
from dflash_torchax.cli.info import dialect_of

from .checkpoints import FIELDS, greedy, save_draft, save_eagle3, save_target, tiny_tokenizer

NEW = 12
PROMPT = "w7 w8 w9"


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(target folder, draft folder, the HF model)."""
    folder = tmp_path_factory.mktemp("pair")
    model = save_target(folder / "target")
    save_draft(folder / "draft", model)
    return folder / "target", folder / "draft", model


@pytest.fixture
def cli(capsys):
    """Run the command line in this process: (exit code, stdout, stderr)."""

    def run(*argv):
        code = main([str(word) for word in argv])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def _is_one_line_error(code, out, err):
    return code == 1 and out == "" and err.count("\n") == 1 and err.startswith("dflash-torchax: ") and "Traceback" not in err


def _models(pair):
    return ("--target", pair[0], "--draft", pair[1])


def test_help_of_every_command_answers_with_examples(cli):
    for argv in ([], *([name] for name in COMMANDS), ["study", "scaling"], ["study", "k-flat"]):
        code, out, err = cli(*argv, "--help")
        assert (code, err) == (0, "")
        assert "examples:" in out


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["nonsense"],
        ["generate", "--nonsense", "x"],
        ["generate", "x", "--max-new-tokens", "0"],
        ["benchmark", "--block-sizes", "4,x"],
        ["study"],
        ["study", "k-flat", "--repeats", "0"],
        ["study", "k-flat", "--context", "0"],
    ],
)
def test_wrong_usage_exits_with_2(cli, argv):
    code, out, err = cli(*argv)
    assert (code, out) == (2, "")
    assert "usage:" in err


def test_generate_prints_the_text_of_hf_and_nothing_else(cli, pair):
    code, out, err = cli("generate", PROMPT, *_models(pair), "--max-new-tokens", NEW)
    expected = greedy(pair[2], [1, 7, 8, 9, 2], NEW)
    assert code == 0
    assert out == tiny_tokenizer().decode(expected) + "\n"
    assert f"{NEW} tokens in" in err
    assert "tau" in err


def test_generate_json_is_one_object(cli, pair, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT + "\n"))
    code, out, err = cli("generate", "--json", "--raw", *_models(pair), "--max-new-tokens", NEW)
    document = json.loads(out)
    assert code == 0
    assert err == ""
    assert document["tokens"] == greedy(pair[2], [7, 8, 9], NEW)
    assert document["stats"]["num_steps"] >= 1


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["generate", "w7", "--target", "/no/such/folder"], "--target"),
        (["generate", "w7", "--target", "nonsense"], "--target"),
        (["generate", "w7", "--draft", "./nowhere"], "--draft"),
        (["generate", "  "], "prompt"),
        (["generate", "w7", "--top-p", "0.9"], "--top-p"),
        (["generate", "w7", "--temperature", "-1"], "--temperature"),
        (["info", "/no/such/folder"], "CHECKPOINT"),
        (["info", "--with", "x"], "--with"),
        (["benchmark", "--prompts", "/no/such/file.jsonl"], "/no/such/file.jsonl"),
        (["benchmark", "--datasets", "nonsense"], "--datasets"),
        (["benchmark", "--output", "/no/such/folder/out.json"], "/no/such/folder"),
        (["benchmark", "--methods", "ar,nonsense"], "nonsense"),
        (["study", "scaling", "--benchmark", "/no/such/file.json"], "--benchmark"),
        (["study", "scaling", "--cost", "1=x"], "cost"),
        (["study", "scaling", "--cost", "2=3.0"], "width 1"),
        (["study", "scaling", "--plot", "p.jpeg"], "--plot: 'p.jpeg' names no format"),
        (["study", "k-flat", "--output", "k.json", "--plot", "k"], "--plot: 'k' names no format"),
        (["compile", "--preset", "qwen3-4b", "--plot", "p"], "--plot: 'p' names no format"),
        # Options that would have no effect.
        (["generate", "w7", "--draft", "none", "--block-size", "4"], "--block-size: 4"),
        (["generate", "w7", "--target", "a/b", "--block-size", "auto"], "--block-size: auto"),
        (["chat", "--target", "a/b", "--block-size", "4"], "--block-size: 4"),
        (["generate", "w7", "--raw", "--system", "Be brief."], "--system: 'Be brief.'"),
        (["study", "k-flat", "--preset", "qwen3-4b", "--topology", "v5p:2x2x1", "--target", "a/b"], "--target: 'a/b'"),
        (["compile", "--preset", "qwen3-4b", "--draft", "none", "--block-size", "6,10"], "--block-size"),
        (["compile", "--preset", "qwen3-4b", "--draft", "none", "--tau", "3"], "--tau"),
        (["compile", "--target", "a/b", "--draft", "c/d", "--preset", "qwen3-4b"], "--preset: 'qwen3-4b'"),
        (["compile", "--preset", "qwen3-4b", "--benchmark", "b.json", "--tau", "3"], "--tau: 3.0"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(cli, argv, named):
    code, out, err = cli(*argv)
    assert _is_one_line_error(code, out, err), (code, out, err)
    assert named in err


def test_block_size_auto_changes_no_token(cli, pair):
    code, out, _ = cli("generate", PROMPT, *_models(pair), "--max-new-tokens", NEW, "--block-size", "auto", "--json")
    assert code == 0
    assert json.loads(out)["tokens"] == greedy(pair[2], [1, 7, 8, 9, 2], NEW)


def test_sampling_is_reproducible(cli, pair):
    def sampled(seed):
        options = ("--max-new-tokens", NEW, "--temperature", "1", "--top-k", "9", "--seed", seed)
        return cli("generate", PROMPT, *_models(pair), *options)[1]

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)


def test_debug_shows_the_traceback(cli):
    code, _, err = cli("generate", "w7", "--target", "/no/such/folder", "--debug")
    assert code == 1
    assert "Traceback" in err


def test_a_draft_of_another_target_is_refused_in_one_line(cli, pair, tmp_path):
    save_draft(tmp_path / "deep", pair[2], dflash_config={"mask_token_id": 5, "target_layer_ids": [0, 9]})
    code, out, err = cli("generate", PROMPT, "--target", pair[0], "--draft", tmp_path / "deep")
    assert _is_one_line_error(code, out, err), (code, out, err)
    assert "target_layer_ids" in err
    code, out, _ = cli("info", tmp_path / "deep", "--with", pair[0], "--json")
    assert code == 1
    assert json.loads(out)["fit"]["fits"] is False


def test_a_damaged_checkpoint_is_one_line(cli, pair, tmp_path):
    save_draft(tmp_path / "draft", pair[2])
    (tmp_path / "draft" / "model.safetensors").write_bytes(b"nonsense")
    assert _is_one_line_error(*cli("info", tmp_path / "draft"))
    (tmp_path / "draft" / "config.json").write_text("{")
    for argv in (["info", tmp_path / "draft"], ["generate", "w7", "--target", pair[0], "--draft", tmp_path / "draft"]):
        assert _is_one_line_error(*cli(*argv)), argv


def test_info_tells_the_dialect_and_what_fits(cli, pair):
    code, out, err = cli("info", pair[1], "--with", pair[0], "--json")
    about = json.loads(out)
    assert (code, err) == (0, "")
    assert about["kind"] == "DFlash draft"
    assert about["dialect"].startswith("z-lab v1")
    assert about["parameters"] == sum(p.numel() for p in save_free_draft(pair[2]).parameters())
    assert about["with"]["kind"] == "target"
    assert about["with"]["supported"] is True
    assert about["fit"]["fits"] is True
    code, out, _ = cli("info", pair[1])
    assert code == 0
    assert "block_size" in out


def test_info_knows_an_eagle3_draft_and_generate_runs_it(cli, pair, tmp_path):
    save_eagle3(tmp_path / "eagle3", pair[2])
    code, out, _ = cli("info", tmp_path / "eagle3", "--with", pair[0], "--json")
    about = json.loads(out)
    assert (code, about["kind"], about["supported"], about["fit"]["fits"]) == (0, "EAGLE-3 draft", True, True)
    code, out, _ = cli("generate", PROMPT, "--target", pair[0], "--draft", tmp_path / "eagle3", "--max-new-tokens", NEW, "--json")
    assert code == 0
    assert json.loads(out)["tokens"] == greedy(pair[2], [1, 7, 8, 9, 2], NEW)
    code, out, err = cli("benchmark", "--target", pair[0], "--draft", tmp_path / "eagle3", "--methods", "dflash")
    assert _is_one_line_error(code, out, err), err
    assert "--eagle3" in err


def save_free_draft(model):
    from .tiny import random_draft

    return random_draft(model, block_size=8)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (FIELDS, "z-lab v1 (fields under dflash_config)"),
        ({**FIELDS, "dflash_config": None, "mask_token_id": 5, "target_layer_ids": [1]}, "z-lab v1 (fields at the top level)"),
        ({"speculators_model_type": "dflash", "aux_hidden_state_layer_ids": [2]}, "speculators"),
        (
            {**FIELDS, "dflash_config": {"selector_rank": 256, "conv_kernel_size": 2}},
            "DFlash2 (grouped convolutions, candidate selector)",
        ),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "SafeAILab or vLLM"),
        (
            {"architectures": ["MuseGlimmerAssistantModel"], "mask_token_id": 9, "block_size": 16},
            "transformers' own assistant (encoder.fc)",
        ),
        ({"architectures": ["LlamaForCausalLM"]}, "Hugging Face"),
    ],
)
def test_dialects_are_told_apart(fields, expected):
    assert dialect_of(fields)[1] == expected


def test_chat_turns_equal_fresh_calls_on_the_whole_conversation(cli, pair, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("w7 w8\nw11 w12 w13\n/stats\n"))
    code, out, err = cli("chat", *_models(pair), "--max-new-tokens", NEW)
    one = greedy(pair[2], [1, 7, 8, 2], NEW)
    two = greedy(pair[2], [1, 7, 8, 2, 1, *one, 2, 1, 11, 12, 13, 2], NEW)
    assert code == 0
    assert out.splitlines() == [tiny_tokenizer().decode(ids) for ids in (one, two)]
    assert "tau" in err


def test_no_color_and_pipes_get_no_escape_codes(pair, monkeypatch):
    from rich.console import Console

    from dflash_torchax.cli.chat import Writer

    def shown():
        stream = io.StringIO()
        writer = Writer(Console(file=stream, force_terminal=True), tiny_tokenizer())
        writer.add([7, 8, 9], 2)
        writer.end()
        return stream.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b[32m" in shown()
    monkeypatch.setenv("NO_COLOR", "1")
    assert shown() == "w7 w8 w9\n"


def test_the_models_text_is_written_as_it_is(monkeypatch):
    said = "warn :100: [b]x[/b]\tcol\ttwo [/v2]\r\n\tend"
    for terminal, colour in ((False, False), (True, False), (True, True)):
        stream = io.StringIO()
        stream.isatty = lambda terminal=terminal: terminal
        monkeypatch.setattr("sys.stdout", stream)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.delenv("NO_COLOR", raising=False)
        writer = chat.Writer(output.console(), SimpleNamespace(decode=lambda ids, **_: said if ids else ""))
        writer.add([7], 1 if colour else 0)
        writer.end()
        assert stream.getvalue() == (f"\x1b[32m{said}\x1b[0m\n" if colour else said + "\n")


def test_info_shows_a_path_with_brackets_as_it_is(cli, pair, tmp_path):
    folder = tmp_path / "runs[v2]" / "a[" / "v2]"
    save_draft(folder, pair[2])
    code, out, err = cli("info", folder)
    assert (code, err) == (0, "")
    assert out.startswith(f"{folder}\n")


def test_stats_of_a_stopped_answer_are_its_own():
    def prepare(ids, **options):
        stats = SimpleNamespace(num_prefill_tokens=3, num_drafted_tokens=8, acceptance_length=2.5, acceptance_rate=0.5)
        return SimpleNamespace(blocks=lambda: iter([([[7]], [0]), ([[8, 9]], [1])]), cache=None, stats=stats)

    loaded = SimpleNamespace(tokenizer=tiny_tokenizer(), model=SimpleNamespace(generate=SimpleNamespace(prepare=prepare)))
    talk = chat.Conversation(loaded, None, NEW, {})
    assert talk.stats_line() is None
    assert list(talk.reply("w7")) == [([7], 0), ([8, 9], 1)]
    assert "3 tokens" in talk.stats_line()
    assert "tau 2.50" in talk.stats_line()
    stopped = talk.reply("w8")
    next(stopped)
    stopped.close()
    assert talk.stats_line().startswith("1 tokens in ")
    assert talk.stats_line().endswith("then stopped")


def test_a_file_is_whole_or_not_there(tmp_path):
    output.write_json(tmp_path / "a.json", {"old": 1})
    with pytest.raises(TypeError):
        output.write_json(tmp_path / "a.json", {"bad": torch.zeros(1)})
    with contextlib.suppress(KeyboardInterrupt), output.replacing(tmp_path / "a.json") as scratch:
        scratch.write_text("{")
        raise KeyboardInterrupt
    assert json.loads((tmp_path / "a.json").read_text()) == {"old": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_json_text_reads_back_whatever_its_layout():
    document = {"a": list(range(200)), "b": [{"c": "x" * 90, "d": [None, True, 1.5]}] * 3, "e": {}}
    assert json.loads(output.dumps(document)) == document
