"""Laws of the benchmark: every method on every batch, figures follow from the records, ours equals z-lab's to the token."""

import io
import json
import random

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_torchax.benchmark import compose, exactness, prompts, report, schedule, summary
from dflash_torchax.benchmark.methods import Budget, Trace
from dflash_torchax.benchmark.prompt_lookup import PromptLookup, last_match_end
from dflash_torchax.cli import main
from dflash_torchax.engine import Engine

from .checkpoints import greedy, save_draft, save_eagle3, save_target, tiny_tokenizer
from .tiny import VOCAB, random_prompts, tiny_target

NEW = 12


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    """A benchmark of all methods on tiny models, through the command line, as its JSON document and folder."""
    folder = tmp_path_factory.mktemp("benchmark")
    model = save_target(folder / "target")
    save_draft(folder / "draft", model)
    save_eagle3(folder / "eagle3", model)
    for name, seed in (("one", 1), ("two", 2)):
        rows = random_prompts((5, 9, 7), seed)
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps({"prompt": " ".join(f"w{i}" for i in row)}) + "\n" for row in rows)
        )
    methods = ["ar", "dflash", "eagle3:3", "prompt-lookup", "hf", "hf-prompt-lookup"] + (["zlab"] if _zlab() else [])
    argv = ["benchmark", "--target", folder / "target", "--draft", folder / "draft", "--eagle3", folder / "eagle3"]
    argv += ["--prompts", folder / "one.jsonl", "--prompts", f"second={folder / 'two.jsonl'}", "--methods", ",".join(methods)]
    argv += ["--max-new-tokens", NEW, "--num-prompts", 2, "--repeats", 2, "--block-sizes", "4"]
    argv += ["--output", folder / "out.json", "--markdown", folder / "out.md", "--plots", folder / "plots"]
    code = main([str(word) for word in argv])
    assert code == 0
    return json.loads((folder / "out.json").read_text()), folder


def _zlab():
    try:
        import dflash  # noqa: F401
    except ImportError:
        return False
    return True


def test_every_method_ran_on_every_prompt_as_often_as_asked(document):
    data, _ = document
    labels = set(data["methods"])
    assert {"ar", "dflash-b4", "eagle3-b3", "prompt-lookup-b4", "hf", "hf-prompt-lookup-b4"} <= labels
    seen = [(r["set"], r["batch"], r["repeat"], r["method"]) for r in data["runs"]]
    assert sorted(seen) == sorted((s, b, r, m) for s in ("one", "second") for b in range(2) for r in range(2) for m in labels)
    assert len({tuple(r["order"] for r in data["runs"] if r["method"] == label) for label in labels}) > 1
    assert all(r["programs_compiled"] == 0 for r in data["runs"]), "warm-up must leave nothing to compile"


def test_all_methods_give_the_tokens_of_hf(document):
    data, _ = document
    assert data["settings"]["reference"] == "hf"
    for sizes in data["summary"].values():
        assert {figures["exact"] for figures in sizes["1"].values()} == {"4/4"}


@pytest.mark.skipif(not _zlab(), reason="z-lab's package dflash is not installed")
def test_steps_equal_those_of_zlab(document):
    data, _ = document
    steps = {(r["set"], r["batch"], r["repeat"], r["method"]): r["committed"] for r in data["runs"]}
    ours = {key[:3]: value for key, value in steps.items() if key[3] == "dflash-b4"}
    assert ours == {key[:3]: value for key, value in steps.items() if key[3] == "zlab-b4"}


def test_figures_follow_from_the_records(document):
    data, _ = document
    assert summary.summarise(data, "ar", NEW) == data["summary"]
    for sizes in data["summary"].values():
        for figures in sizes["1"].values():
            if "tau" in figures:
                assert sum(figures["acceptance_by_position"]) == pytest.approx(figures["tau"], abs=1e-3)
        assert sizes["1"]["ar"]["speedup"] == 1.0


def test_markdown_and_plots_show_every_method(document):
    data, folder = document
    text = (folder / "out.md").read_text()
    assert text == report.markdown(data)
    assert text.count("peak MB") == 1
    for label in data["methods"]:
        assert f"| {label} |" in text
    assert {path.name for path in (folder / "plots").iterdir()} == {"speedup.svg", "tau.svg", "positions.svg", "tokens.svg"}


def test_json_on_stdout_is_the_whole_output(document, capsys):
    _, folder = document
    argv = ["benchmark", "--json", "--target", folder / "target", "--prompts", folder / "one.jsonl", "--num-prompts", 2]
    code = main([str(word) for word in (*argv, "--batch-sizes", 2, "--max-new-tokens", NEW)])
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    assert (code, captured.err) == (0, "")
    assert list(data["methods"]) == ["ar"]
    assert data["summary"]["one"]["2"]["ar"]["prompts"] == 2


class _Fake:
    """A method that emits given tokens in given times."""

    name, block_size, max_batch = "fake", 4, 1

    def __init__(self, label, tokens, seconds=1.0, committed=None):
        self.label, self.tokens, self.seconds, self.committed = label, tokens, seconds, committed
        self.calls = []

    def shape_key(self, prompts, budget):
        return 0

    def run(self, prompts, budget):
        self.calls.append(budget)
        return Trace([list(self.tokens)], 0.5, self.seconds, self.committed, [(0.5, 1)])

    trace = run


def test_a_differing_output_is_reported_with_its_position_and_gap():
    methods = [_Fake("good", [5, 6, 7]), _Fake("bad", [5, 9, 7], 2.0)]
    plan = schedule.Plan({"set": [[1, 2]]}, Budget(3, ()), (1,), 1, 0, "good")
    result = schedule.run(methods, plan, gap=lambda prefix: 0.25 if prefix == [1, 2, 5] else None)
    figures = summary.summarise(result, "good", 3)["set"]["1"]
    assert figures["good"]["exact"] == "1/1"
    assert figures["bad"]["exact"] == "0/1"
    assert figures["bad"]["first_difference"] == {"position": 1, "expected": 6, "got": 9, "top2_gap": 0.25}
    assert figures["bad"]["speedup"] == 0.5
    assert figures["bad"]["ms_per_token"] == 1000.0
    assert figures["bad"]["tokens_per_second"] == pytest.approx(3 / 2.5)


def test_acceptance_counts_only_tokens_that_could_be_committed():
    # 6 new tokens, blocks of 4: after the first token 5 are left, so the steps may draft 3, then 2, then 0.
    method = _Fake("m", [1] * 6, committed=[[3, 1, 1]])
    result = schedule.run([method], schedule.Plan({"set": [[1]]}, Budget(6, ()), (1,), 1, 0, "m"), None)
    figures = summary.summarise(result, "m", 6)["set"]["1"]["m"]
    assert figures["tau"] == pytest.approx(5 / 3, abs=1e-4)
    assert figures["acceptance_rate"] == pytest.approx(2 / (3 + 1), abs=1e-4)
    assert figures["acceptance_by_position"] == [1.0, 0.3333, 0.3333, 0.0]


def test_the_order_of_methods_changes_with_batches_and_not_with_reruns():
    def orders():
        methods = [_Fake(str(index), [1, 2]) for index in range(4)]
        result = schedule.run(methods, schedule.Plan({"set": [[1]] * 8}, Budget(2, ()), (1,), 1, 3, "0"), None)
        return [record["method"] for record in result["runs"]]

    assert orders() == orders()
    assert len({tuple(orders()[i : i + 4]) for i in range(0, 32, 4)}) > 3


@pytest.mark.parametrize(
    ("expected", "got", "index"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [4], 0)]
)
def test_first_difference(expected, got, index):
    assert exactness.first_difference(expected, got) == index


def test_top2_gap_is_that_of_the_model():
    model = tiny_target("llama")
    prefix = random_prompts((11,))[0]
    import torch

    with torch.no_grad():
        best = model(torch.tensor([prefix])).logits[0, -1].float().topk(2).values
    assert exactness.Top2Gap(Engine(model))(prefix) == pytest.approx(float(best[0] - best[1]), abs=1e-4)


def _match_by_hand(row, length):
    """Slot after the longest, then latest, earlier occurrence of the row's last 3, 2 or 1 tokens."""
    for size in (3, 2, 1):
        for end in range(length - 1, size - 1, -1):
            if size <= length and row[end - size : end] == row[length - size : length]:
                return end
    return length - 1


def test_prompt_lookup_finds_the_longest_latest_match():
    generator = random.Random(0)
    rows, lengths = [], []
    for _ in range(300):
        rows.append([generator.randrange(4) for _ in range(16)])
        lengths.append(generator.randrange(1, 17))
    got = last_match_end(jnp.asarray(rows, jnp.int32), jnp.asarray(lengths, jnp.int32))
    assert np.asarray(got).tolist() == [_match_by_hand(row, length) for row, length in zip(rows, lengths, strict=True)]


def test_prompt_lookup_is_exact_and_finds_repetition():
    from dflash_torchax import enabled, last_stats

    model = tiny_target("llama")
    prompt = random_prompts((6,))[0] * 4
    import torch

    with enabled(model, PromptLookup(5)):
        out = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)[0, len(prompt) :].tolist()
        stats = last_stats(model)
    assert out == greedy(model, prompt, 40)
    assert stats.num_drafted_tokens > 0


def test_methods_without_their_checkpoint_are_refused_by_name():
    model = tiny_target("llama")
    for names, named in (
        (["eagle3"], "eagle3 needs"),
        (["dflash"], "dflash needs"),
        (["zlab"], "zlab needs"),
        (["x"], "'x' is not known"),
    ):
        with pytest.raises(ValueError, match=named):
            compose.make_methods(names, model)
    for word in ("ar:4", "dflash:0", "dflash:x"):
        with pytest.raises(ValueError, match="block size of at least 1"):
            compose.parse(word)
    with pytest.raises(ValueError, match="prompt-lookup-b4 named twice"):
        compose.make_methods(["prompt-lookup:4", "prompt-lookup"], model, block_sizes=[4])


def test_each_method_takes_its_own_block_size():
    methods = compose.make_methods(["ar", "prompt-lookup:3", "prompt-lookup"], tiny_target("llama"), block_sizes=[2, 5])
    assert [method.label for method in methods] == ["ar", "prompt-lookup-b3", "prompt-lookup-b2", "prompt-lookup-b5"]
    assert len({id(method.engine.params.target) for method in methods}) == 1


def test_sampled_runs_are_reproducible_and_not_compared():
    methods = compose.make_methods(["ar", "hf"], tiny_target("llama"))
    prompts_of = {"set": random_prompts((5, 6))}

    def tokens(seed):
        return [method.run(prompts_of["set"][:1], Budget(NEW, (), 1.0, seed)).tokens for method in methods]

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)
    result = schedule.run(methods, schedule.Plan(prompts_of, Budget(NEW, (), 1.0), (1, 2), 1, 0, "ar"), None)
    for sizes in summary.summarise(result, "ar", NEW).values():
        assert all("first_difference" not in rows["hf"] for rows in sizes.values())


def test_a_prompt_file_is_read_or_refused_with_its_line(tmp_path):
    file = tmp_path / "some.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"turns": ["b", "c"]}\n')
    assert prompts.file_set(str(file), 9).conversations == (("a",), ("b", "c"))
    assert prompts.file_set(f"name={file}", 1) == prompts.PromptSet("name", (("a",),), "some.jsonl, first 1")
    for line in ('{"text": "a"}', "nonsense", '{"prompt": ""}', '{"turns": []}', "[]"):
        file.write_text('{"prompt": "a"}\n' + line + "\n")
        with pytest.raises(ValueError, match="some.jsonl line 2"):
            prompts.file_set(str(file), 9)


def test_a_prompt_file_with_an_equals_sign_in_its_path(tmp_path, monkeypatch):
    folder = tmp_path / "lr=0.1"
    folder.mkdir()
    (folder / "q.jsonl").write_text('{"prompt": "a"}\n')
    monkeypatch.chdir(tmp_path)
    assert [prompts.file_set(text, 1).name for text in ("lr=0.1/q.jsonl", "mine=lr=0.1/q.jsonl")] == ["q", "mine"]
    with pytest.raises(FileNotFoundError, match="lr=0.2/q.jsonl is not a file"):
        prompts.file_set("lr=0.2/q.jsonl", 1)


def test_memory_is_shown_once_with_the_call_it_was_measured_over(document):
    data, _ = document
    data = {**data, "methods": {"ar": {**data["methods"]["ar"], "peak_memory_bytes": 7e6}}}
    words = data["runs"][0]["prompt_tokens"][0]
    assert list(report.memory(data)) == [("ar", f"one, batch 1, {words} prompt and {NEW} new tokens", "7")]
    assert not any("peak" in column for column in report.COLUMNS)
    assert "peak_memory_bytes" in data["definitions"]


def test_names_of_sets_are_no_markup(document):
    from rich.console import Console

    data, _ = document
    named = {**data, "summary": {"a[/v2] :100:": data["summary"]["one"]}}
    console = Console(file=io.StringIO(), width=200)
    report.print_rich(named, console)
    assert console.file.getvalue().count("a[/v2] :100:") >= 2  # a title and the first column of acceptance by position


def test_later_turns_follow_the_targets_own_answer():
    one = prompts.PromptSet("set", (("w7", "w8"), ("w9",)), "")
    rows = prompts.expand(one, tiny_tokenizer(), lambda ids: "w50")
    assert rows == [[1, 7, 2], [1, 7, 2, 1, 50, 2, 1, 8, 2], [1, 9, 2]]


@pytest.mark.skipif(not _zlab(), reason="z-lab's package dflash is not installed")
def test_prompts_are_built_as_zlab_builds_them():
    requests = pytest.importorskip("requests")
    assert requests
    from dflash.benchmark import DATASETS, _select_dataset

    row = {"question": "q?", "problem": "p {x}?", "prompt": "def f(): {}", "instruction": "i", "input": ""}
    for name in ("gsm8k", "math500", "humaneval", "mbpp"):
        assert prompts.PUBLIC[name].turns(row) == (DATASETS[name]["format"](row),), name
        assert (prompts.PUBLIC[name].path, prompts.PUBLIC[name].config) == (*DATASETS[name]["load_args"], None)[:2]
    rows = list(range(50))
    order = list(rows)
    random.Random(prompts._SEED).shuffle(order)
    assert _select_dataset(rows, 7) == order[:7]


def test_shipped_prompts_are_there():
    assert [(one.name, len(one.conversations)) for one in prompts.shipped_sets(20)] == [("chat", 20), ("code", 20), ("gsm8k", 20)]


def test_constant_acceptance_inverts_the_sum():
    for rate in (0.0, 0.3, 0.9, 1.0):
        assert summary.constant_acceptance(sum(rate**k for k in range(9)), 9) == pytest.approx(rate, abs=1e-6)


def test_vocabulary_of_the_tiny_tokenizer_is_the_models():
    assert len(tiny_tokenizer()) == VOCAB
