"""Law: generated pages say what the committed JSON says, and links lead somewhere."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

import dflash_torchax
from dflash_torchax.benchmark import report, summary
from dflash_torchax.cli import COMMANDS

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def build():
    """docs/build.py as a module."""
    spec = importlib.util.spec_from_file_location("docs_build", ROOT / "docs" / "build.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs")
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def document(build):
    return build.benchmark_document()


@pytest.fixture(params=["benchmark", "math"])
def committed(build, request):
    """Each committed run."""
    return build.benchmark_document() if request.param == "benchmark" else build.math_document()


def test_results_page_is_made_from_the_committed_json(build, document):
    assert (ROOT / "docs" / "results.md").read_text() == build.results_page(document)


def test_readme_block_is_made_from_the_committed_json(build, document):
    readme = ROOT / "README.md"
    if not readme.is_file() or "<!-- results:begin -->" not in readme.read_text():
        pytest.skip("README.md has no results block")
    text = readme.read_text()
    assert build.with_block(text, build.readme_block(document)) == text


def test_the_tpu_table_is_made_from_the_committed_json(build):
    estimates = build.tpu_estimates
    text, block = (ROOT / "docs" / "tpu.md").read_text(), estimates.block(json.loads(estimates.FILE.read_text()))
    assert block in text
    assert build.with_block(text, block) == text


def test_a_readme_block_is_filled_and_nothing_else(build, document):
    text = "# Title\n<!-- results:begin -->\nold\n<!-- results:end -->\nafter\n"
    block = build.readme_block(document)
    once = build.with_block(text, block)
    assert once.startswith("# Title\n<!-- results:begin -->\n")
    assert once.endswith("<!-- results:end -->\nafter\n")
    assert "old" not in once
    assert build.with_block(once, block) == once
    assert build.with_block("no marks", block) == "no marks"


def test_committed_figures_follow_from_the_committed_records(committed):
    settings = committed["settings"]
    assert summary.summarise(committed, settings["baseline"], settings["max_new_tokens"]) == committed["summary"]
    renamed = {"peak_memory_mb", "peak_memory_bytes"}  # the first is what older results call the second
    figures = summary.DEFINITIONS.keys() - renamed
    assert committed["definitions"].keys() - renamed == figures
    assert all(committed["definitions"][name] == summary.DEFINITIONS[name] for name in figures)


def test_committed_results_are_exact_and_step_like_zlab(committed):
    document = committed
    for sizes in document["summary"].values():
        for rows in sizes.values():
            for label, figures in rows.items():
                same, compared = figures["exact"].split("/")
                assert same == compared, label
            tau = {label.split("-b")[0]: figures.get("tau") for label, figures in rows.items()}
            if "zlab" in tau:
                assert tau["dflash"] == tau["zlab"]


def test_tables_show_the_figures_of_the_json(document):
    text = report.markdown(document)
    for sizes in document["summary"].values():
        for rows in sizes.values():
            for label, figures in rows.items():
                assert re.search(rf"\| {label} \| {figures['ms_per_token']:.1f} \| .* \| {figures['speedup']:.2f}x ", text), label


def test_ratios_are_those_of_the_json(build, committed):
    times = {label: figures["ms_per_token"] for label, figures in committed["summary"]["gsm8k"]["1"].items()}
    best = min((label for label in times if label.startswith("dflash")), key=times.get)
    line = build.ratios_line(committed)
    assert f"`{best}` takes {times[best]:.1f} ms/token" in line
    for other in ("hf", "zlab-b8"):
        assert f"{times[other] / times[best]:.2f} times as fast as `{other}`" in line
    assert build.ratios_line({**committed, "summary": {}}) == ""
    document = build.benchmark_document()
    for page in (build.results_page(document), build.readme_block(document)):
        assert line in page


def test_the_math_line_says_when_the_machine_was_busy(build):
    document = build.math_document()
    for load, busy in ((0.1, False), (9.0, True)):
        document["environment"]["load_average_at_start"] = load
        line = build.math_line(document, "m.json")
        assert ("busy" in line, "(m.json)" in line) == (busy, True)


def test_a_continuation_line_is_no_item(build):
    def function():
        """Do it.

        Args:
            how, why: "greedy" (the
                samples: of it) or another.
            **more: the rest.
        """

    text = build.docstring(function)
    assert re.findall(r"^- `(.*?)`", text, re.MULTILINE) == ["how, why", "**more"]
    assert "samples: of it" in text
    assert "- ` " not in build.api_page()


def test_api_page_has_every_public_name_and_all_are_documented(build):
    text = (ROOT / "docs" / "api.md").read_text()
    for name in dflash_torchax.__all__:
        if name != "__version__":
            assert f"\n## {name}\n" in text, f"{name} is missing: run python docs/build.py"
            assert build.docstring(getattr(dflash_torchax, name)), name


def test_command_line_page_has_an_example_of_every_command():
    text = (ROOT / "docs" / "command-line.md").read_text()
    for command in (*COMMANDS, "study scaling", "study k-flat"):
        assert re.search(rf"^(echo .*\| )?dflash-torchax {command} ", text, re.MULTILINE), command


def test_links_between_pages_lead_somewhere():
    pages = [*(ROOT / "docs").glob("*.md"), *ROOT.glob("README.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
