"""Shared set-up: tiny models gain nothing from more torch threads, which would fight XLA's for the cores."""

import os
import signal

# A shell starts background jobs with SIGINT ignored, and the processes that tests interrupt would inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import torch  # noqa: E402

torch.set_num_threads(1)

import pytest  # noqa: E402


@pytest.fixture(scope="session")
def smollm2():
    """(target, draft, tokenizer) of the embedded pair; converted once per machine."""
    from dflash_torchax import load_embedded

    return load_embedded()


from .training_cases import trained_on  # noqa: E402, F401 (a fixture)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """The exactness matrix is large: only its fast part runs in `make test`, all of it in `make test-slow`."""
    for item in items:
        is_fast = getattr(item.module, "is_fast", None)
        if is_fast is not None:
            params = dict(item.callspec.params)
            case = {"test": item.originalname, "architecture": params.pop("case"), **params}
            if not is_fast(**case):
                item.add_marker(pytest.mark.slow)
