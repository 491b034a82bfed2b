"""`enable`, `disable`, `enabled`, `last_stats`: the drop-in's switches."""

import contextlib

from .generate import Generate


def enable(model, draft=None, *, block_size=None, max_length=None, cache="auto", mesh=None,
           draft_sampling=None):
    """Replace `model.generate` by a compiled one; everything else of the model stays as it is.

    Args:
        model: HF causal language model, from `from_pretrained` or `load_target`.
        draft: `load_draft(...)`; None compiles plain autoregressive decoding.
        block_size: slots per block, anchor included, at most the draft's; None takes the draft's. "auto" chooses while
            it generates, from acceptance seen and step cost measured; greedy output never changes.
        max_length: longest prompt + output to provide for. Then one cache length serves every call; None sizes
            caches by request, in powers of two.
        cache: the target's KV cache: "static" (contiguous), "paged" (`PagedCache(page_size=..., num_pages=...)` to size
            it), or "auto": paged on TPU where the Pallas kernel can serve the model, else static.
        mesh: `jax.sharding.Mesh` to run on. Axes named "data", "dp", "batch", "fsdp" or "replica" split the batch, all
            others split heads, ffn and vocabulary, of the target and of the draft.
        draft_sampling: what is proposed where do_sample is set: "greedy" (the draft's argmax, against which the target
            samples: with one seed the text does not depend on the draft) or "probabilistic" (samples of the draft, accepted
            by rejection). Both keep the target's distribution. None takes "probabilistic", which accepts a little more, for
            a DFlash draft, and "greedy" for other drafts and with block_size="auto".

    Returns:
        The same model. Its weights are read now: call `enable` again after changing them.

    Raises:
        ValueError, TypeError, NotImplementedError: one paragraph naming argument, value and the way out; then
            `model.generate` is what it was before.
    """
    from .auto_block import AutoEngine
    from .engine import Engine

    options = {"max_length": max_length, "cache": cache, "mesh": mesh, "draft_sampling": draft_sampling}
    auto = block_size == "auto"
    engine = AutoEngine(model, draft, **options) if auto else Engine(model, draft, block_size=block_size, **options)
    disable(model)
    model.generate = Generate(model, engine)
    return model


def disable(model):
    """Give `model` back the generate it had before `enable`; does nothing on a model that is not enabled."""
    generate = model.__dict__.get("generate")
    if isinstance(generate, Generate):
        generate.restore(model)
    return model


@contextlib.contextmanager
def enabled(model, draft=None, **options):
    """`enable` for the length of a `with` block; the block gets the model."""
    before = model.__dict__.get("generate")
    enable(model, draft, **options)
    try:
        yield model
    finally:
        disable(model)
        if before is not None:
            model.generate = before


def last_stats(model):
    """`DecodeStats` of the last `generate` call on an enabled model.

    Raises:
        ValueError: the model is not enabled, or generate was not called yet.
    """
    generate = model.__dict__.get("generate")
    if not isinstance(generate, Generate):
        raise ValueError("model: not enabled; call dflash_torchax.enable(model, draft) first")
    if generate.last_stats is None:
        raise ValueError("model: generate was not called since enable; there are no stats yet")
    return generate.last_stats


def stream_blocks(model, *args, **kwargs):
    """Generate on an enabled model, block by block.

    Args: as `model.generate`.

    Yields:
        (ids, accepted): per row the list of ids committed by this step and the number of accepted draft tokens among
        them. The first item is each row's first token, which comes from the prompt alone.
    """
    generate = model.__dict__.get("generate")
    if not isinstance(generate, Generate):
        raise ValueError("model: not enabled; call dflash_torchax.enable(model, draft) first")
    call = generate.prepare(*args, **kwargs)
    yield from call.blocks()
    generate.last_stats = call.stats
