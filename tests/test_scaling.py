"""Laws of the scaling study: rows sum to the published tau, longer blocks never lose, the best block is the best."""

import json
import math

import pytest

from dflash_torchax.benchmark import scaling
from dflash_torchax.cli import main


def test_published_rows_sum_to_the_published_tau():
    tasks = json.loads(scaling.PUBLISHED.read_text())["tasks"]
    assert set(tasks) == {"math500", "gsm8k", "mt-bench", "alpaca"}
    for task in tasks.values():
        assert math.fsum(task["acceptance_by_position"]) == pytest.approx(task["tau"], abs=0.0051)


def test_expected_tau_is_the_partial_sum_then_a_geometric_tail():
    row, ratio = [1, 0.8, 0.6, 0.3], 0.5
    long = row + [0.3 * ratio ** (k + 1) for k in range(200)]
    for size in (1, 2, 4, 5, 9, 64):
        assert scaling.expected_tau(row, size, ratio) == pytest.approx(sum(long[:size]))
    assert scaling.expected_tau(row, math.inf, ratio) == pytest.approx(sum(long))


def test_statements_about_the_published_rows():
    document = scaling.study(*scaling.published())
    reach, add, gain = document["statements"]
    assert "90 %" in reach["statement"]
    assert reach["holds"] == ["gsm8k", "mt-bench"]
    assert reach["fails"] == ["math500"]
    assert reach["depends_on_tail"] == ["alpaca"]
    assert "less than one token" in add["statement"]
    assert add["fails"] == ["math500"]
    assert set(add["holds"]) == {"gsm8k", "mt-bench", "alpaca"}
    assert set(gain["holds"]) == {"math500", "gsm8k", "mt-bench", "alpaca"}
    assert [task["name"] for task in document["tasks"]] == ["math500", "gsm8k", "mt-bench", "alpaca"]
    for task in document["tasks"]:
        assert task["expected_tau"] == sorted(task["expected_tau"])
        assert task["limit"]["last"] >= task["expected_tau"][-1] - 1e-3


def test_raising_acceptance_raises_each_conditional_rate():
    better = scaling.raised([1, 0.5, 0.25, 0.0])
    assert better == pytest.approx([1, 0.55, 0.55 * 0.55, 0.55 * 0.55 * 0.05])
    assert scaling.raised([1, 0.99])[1] == 1.0


def test_best_block_size_is_found_among_interpolated_costs():
    row, cost = [1, 0.9, 0.8, 0.1, 0.05], {1: 10.0, 3: 14.0, 5: 40.0}
    best = scaling.best_block_size(row, 0.5, cost)
    assert best["block_size"] == 3
    assert best["speedup"] == pytest.approx(10 / (14 / 2.7))
    assert scaling.step_cost(cost, 2) == 12.0
    # Where drafting never pays, the plain step is the best block.
    assert scaling.best_block_size([1, 0.1, 0.0], 0.1, {1: 10.0, 2: 20.0, 3: 30.0})["block_size"] == 1


@pytest.mark.parametrize("row", [[0.9, 0.5], [1, 0.5, 0.6], []])
def test_a_row_that_is_none_is_refused(row):
    with pytest.raises(ValueError, match="acceptance_by_position of task"):
        scaling.study({"task": row}, "here")


def test_an_all_or_nothing_draft_has_a_finite_study():
    for row in ([1, 1, 1, 1], [1, 0, 0, 0], [1, 0.0]):
        document = scaling.study({"task": row}, "here", {1: 1.0, 4: 2.0})
        assert all(math.isfinite(tau) for tau in document["tasks"][0]["expected_tau"])


def test_the_command_reads_a_benchmark_and_writes_json_and_plot(tmp_path, capsys):
    benchmark = {
        "settings": {"main_method": "dflash-b4", "target": "t"},
        "environment": {"date": "d"},
        "summary": {"task": {"1": {"ar": {}, "dflash-b4": {"acceptance_by_position": [1, 0.5, 0.4, 0.1]}}}},
    }
    (tmp_path / "b.json").write_text(json.dumps(benchmark))
    argv = [
        "study",
        "scaling",
        "--benchmark",
        str(tmp_path / "b.json"),
        "--cost",
        "1=1,4=2",
        "--plot",
        str(tmp_path / "p.svg"),
        "--json",
    ]
    assert main(argv) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert captured.err == ""
    assert document["tasks"][0]["expected_tau"][1] == 2.0
    # Widths 1..4 cost 1, 4/3, 5/3, 2 ms for tau 1, 1.5, 1.9, 2: three slots are best.
    assert document["tasks"][0]["best"] == {"block_size": 3, "ms_per_token": 0.8772, "speedup": 1.14}
    assert (tmp_path / "p.svg").read_text().startswith("<?xml")
    assert main([*argv, "--method", "nonsense"]) == 1
    assert "nonsense" in capsys.readouterr().err


def test_plots_of_equal_data_are_equal_and_carry_no_date(tmp_path):
    from dflash_torchax.aot import plots

    document = {"title": "t", "rows": [{"width": 1, "ms": 1.0}, {"width": 2, "ms": 1.5}]}
    for suffix, date in ((".svg", b"<dc:date>"), (".pdf", b"CreationDate")):
        files = [tmp_path / f"{name}{suffix}" for name in ("one", "two")]
        for file in files:
            plots.widths(document, file)
        assert date not in files[0].read_bytes()
        assert files[0].read_bytes() == files[1].read_bytes()


def test_a_cost_file_with_an_equals_sign_in_its_path(tmp_path, monkeypatch):
    (tmp_path / "k=1").mkdir()
    (tmp_path / "k=1" / "flat.json").write_text('{"1": 2, "4": 3.5}')
    monkeypatch.chdir(tmp_path)
    assert scaling.parse_cost("k=1/flat.json") == {1: 2.0, 4: 3.5}
    long = ",".join(f"{width}={width}.5" for width in range(1, 100))  # longer than a file's name may be
    assert len(scaling.parse_cost(long)) == 99


def test_cost_tables_from_text_and_files(tmp_path):
    assert scaling.parse_cost("8=47,1=25.5") == {1: 25.5, 8: 47.0}
    measured = [{"width": 4, "ms": 3.5, "estimated_ms": 9}, {"width": 1, "ms": 2}]
    estimated = [{"width": 4, "estimated_ms": 3.5, "roofline_ms": 1}, {"width": 1, "estimated_ms": 2}]
    for document in ({"1": 2, "4": 3.5}, {"rows": measured}, {"rows": estimated}):
        (tmp_path / "c.json").write_text(json.dumps(document))
        assert scaling.parse_cost(str(tmp_path / "c.json")) == {1: 2.0, 4: 3.5}
    (tmp_path / "c.json").write_text("[]")
    for text in (str(tmp_path / "c.json"), "1=0", "a=b", "1=2,3"):
        with pytest.raises(ValueError, match="cost: give WIDTH=MS"):
            scaling.parse_cost(text)
