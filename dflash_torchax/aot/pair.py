"""`compile_pair`: everything the compiler says of a target and draft on a topology, as one JSON document."""

import jax

from . import report as reports
from .executables import save_executable
from .programs import CapacityError, Compiler, Shape
from .topology import check_libtpu, chip_of, mesh_of

NOTE = "Estimates of the XLA:TPU compiler and rooflines, not timings."


def compile_pair(
    target,
    draft,
    topology,
    *,
    tp=1,
    dp=1,
    batch=1,
    context=2048,
    block_sizes=(None,),
    prefill=(),
    cache="auto",
    tau=None,
    options=None,
    operations=0,
    progress=lambda name: None,
):
    """Compile prefill buckets, the plain step and a DFlash step per block size.

    Args:
        target, draft: modules on meta, of `programs.abstract_target` and `abstract_draft`; draft None for plain only.
        topology: name like "v5p:2x2x1".
        tp, dp: chips that split heads, ffn and vocabulary, and chips that split the batch.
        prefill: prompt buckets, tokens.
        tau: committed tokens per step, for ms per token; None leaves that out.
        options: XLA options; None takes `report.COUNT_BYTES_ONCE`.
        operations: how many of the costliest kinds of operations each program's report lists.
        progress: called with the name of what is compiled next.

    Returns:
        dict: settings, chip, programs (`report.Report` as dicts), per_token, largest_context.

    Raises:
        ValueError, ImportError: as `topology.mesh_of`; `CapacityError` with the numbers where it does not fit.
    """
    chip, mesh = chip_of(topology), mesh_of(topology, tp, dp)
    options = reports.COUNT_BYTES_ONCE if options is None else options
    document = {
        "note": NOTE,
        "jax": jax.__version__,
        "libtpu": check_libtpu(),
        "topology": topology,
        "tp": tp,
        "dp": dp,
        "batch": batch,
        "context": context,
        "xla_options": options,
        "chip": vars(chip),
        "crossover_tokens": chip.crossover(),
        "programs": [],
        "per_token": [],
    }
    plain = None
    for block_size in block_sizes if draft is not None else (None,):
        compiler = Compiler(target, draft, mesh, Shape(batch, context, block_size), cache, options)
        check_fits(compiler, chip, topology, tp)
        target_bytes, draft_bytes = reports.context_bytes_per_token(compiler.engine, batch)

        def add(program):
            report = reports.report_of(program, chip, target_bytes * context)
            row = {**report.to_dict(), "fits": reports.fits(report, chip)}
            if operations:
                row["operations"] = reports.operations_of(program.compiled.as_text(), operations)
            document["programs"].append(row)
            return report

        if plain is None:
            document["cache"] = type(compiler.plain.decoder.cache).__name__
            progress("plain step")
            plain = add(compiler.plain_step())
            for width in prefill:
                progress(f"prefill {width}")
                add(compiler.prefill(width))
        if draft is None:
            document["largest_context"] = reports.largest_context(plain, chip, target_bytes, context)
            continue
        progress(f"DFlash step {compiler.engine.block_size}")
        step = add(compiler.dflash_step())
        document["largest_context"] = reports.largest_context(step, chip, target_bytes + draft_bytes, context)
        document["per_token"].append(_per_token(step, plain, tau))
    return document


def _per_token(step, plain, tau):
    row = {
        "block_size": step.width,
        "step_ms": step.estimated_ms,
        "plain_ms": plain.estimated_ms,
        "step_over_plain": step.estimated_ms / plain.estimated_ms,
        "tau": tau,
    }
    return (
        row
        if tau is None
        else {**row, "ms_per_token": step.estimated_ms / tau, "speedup": plain.estimated_ms * tau / step.estimated_ms}
    )


def check_fits(compiler, chip, topology, tp):
    """Raise CapacityError, before anything is compiled, where weights and caches alone exceed HBM."""
    need, have = compiler.argument_bytes(), chip.hbm
    if need > have:
        raise CapacityError(
            f"tp: weights and caches of batch {compiler.shape.batch} and context {compiler.shape.context} take "
            f"{need / 2**30:.1f} GiB on each device, but a {chip.name} has {have / 2**30:.0f} GiB. "
            f"Raise tp above {tp} (chips of {topology}), or lower context or batch."
        )


def save_pair(target, draft, topology, folder, *, tp=1, dp=1, batch=1, context=2048, block_size=None, prefill=(256,), cache="auto"):
    """Compile what `enable(model, draft, max_length=context, mesh=...)` runs and save it for `use_executables`.

    Returns:
        the paths written.
    """
    mesh = mesh_of(topology, tp, dp)
    compiler = Compiler(target, draft, mesh, Shape(batch, context, block_size, as_served=True), cache)
    check_fits(compiler, chip_of(topology), topology, tp)
    programs = [("prefill", compiler.prefill(width)) for width in prefill] + [("decode_loop", compiler.decode_loop())]
    return [save_executable(p.compiled, p.args, p.kwargs, folder, name, compiler.engine) for name, p in programs]
