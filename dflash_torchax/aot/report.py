"""What the compiler says of a program, next to the chip's roofline. Estimates, not timings."""

import dataclasses
import math
import re

import jax

# XLA's cost analysis counts an asynchronous copy into VMEM five times over: read, two outputs of its start, one of its end,
# and the read by its user. Without such prefetches its bytes are those that HBM moves.
COUNT_BYTES_ONCE = {"xla_msa_max_outstanding_prefetches": "0"}
# Share of HBM that programs may fill; the rest is the runtime's.
_USABLE = 0.97
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")
_ITEM = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4, "s64": 8, "f64": 8}
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One kind of collective of one size: `count` of them, each with a result of `bytes` per device."""

    kind: str
    bytes: int
    count: int


@dataclasses.dataclass(frozen=True)
class Report:
    """One program on one device; times are the compiler's estimates.

    Fields:
        name, width: the program and the tokens of a row it reads at once.
        compile_seconds: on this machine.
        argument_bytes, temporary_bytes, total_bytes: HBM; total counts donated outputs once.
        flops, bytes: per run, by XLA's cost analysis.
        kernel_calls: Pallas kernels of the target's attention; XLA's analysis knows neither their bytes nor their flops.
        draft_kernel_calls: Pallas kernels of the draft's attention, which say themselves what they read.
        kernel_ms: reading the whole context's K/V once at full bandwidth, which those kernels do.
        estimated_ms: the compiler's time without the kernels, plus `kernel_ms`.
        roofline_ms: the longer of reading every argument once and multiplying at the chip's peak.
        collectives: by kind and size.
    """

    name: str
    width: int
    compile_seconds: float
    argument_bytes: int
    temporary_bytes: int
    total_bytes: int
    flops: float
    bytes: float
    kernel_calls: int
    draft_kernel_calls: int
    kernel_ms: float
    estimated_ms: float
    roofline_ms: float
    collectives: tuple[Collective, ...]

    def to_dict(self):
        return dataclasses.asdict(self)


def report_of(program, chip, context_bytes=0):
    """`Report` of a `programs.Program`.

    Args:
        chip: `topology.Chip`.
        context_bytes: target K/V of the whole context on one device, read by the attention kernels.
    """
    text, cost, memory = program.compiled.as_text(), _cost(program.compiled), program.compiled.memory_analysis()
    kernels = [line for line in text.splitlines() if 'custom_call_target="tpu_custom_call"' in line]
    of_draft = sum("/draft/" in line for line in kernels)
    calls = len(kernels) - of_draft
    kernel_ms = context_bytes / chip.bandwidth * 1e3 if calls else 0.0
    arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    flops = float(cost.get("flops", 0.0))
    return Report(
        name=program.name,
        width=program.width,
        compile_seconds=program.seconds,
        argument_bytes=arguments,
        temporary_bytes=temporaries,
        total_bytes=arguments + temporaries + memory.output_size_in_bytes - memory.alias_size_in_bytes,
        flops=flops,
        bytes=float(cost.get("bytes accessed", 0.0)),
        kernel_calls=calls,
        draft_kernel_calls=of_draft,
        kernel_ms=kernel_ms,
        estimated_ms=float(cost.get("optimal_seconds", 0.0)) * 1e3 + kernel_ms,
        roofline_ms=max(arguments / chip.bandwidth, flops / chip.flops) * 1e3,
        collectives=collectives_of(text),
    )


def _cost(compiled):
    cost = compiled.cost_analysis()
    return cost[0] if isinstance(cost, list) else cost


def collectives_of(text):
    """Collectives of an optimized HLO text, grouped by kind and size, largest first."""
    counts = {}
    for line in text.splitlines():
        match = _INSTRUCTION.match(line)
        kind = match and match.group(3).removesuffix("-start")
        if kind in _COLLECTIVES:
            key = (kind, max((size for size in _sizes(match.group(2))), default=0))
            counts[key] = counts.get(key, 0) + 1
    return tuple(Collective(kind, size, n) for (kind, size), n in sorted(counts.items(), key=lambda item: -item[0][1]))


def _sizes(shape):
    for dtype, dims in re.findall(r"([a-z]\w*)\[([\d,]*)\]", shape):
        yield _ITEM.get(dtype, 0) * math.prod(int(d) for d in dims.split(",") if d)


def operations_of(text, top=15):
    """Where the compiler's scheduler expects cycles to go: rows (operation, count, cycles), most first.

    Args:
        text: optimized HLO of a TPU program.
    """
    totals = {}
    for line in text[text.index("\nENTRY") :].splitlines():
        match, cycles = _INSTRUCTION.match(line), re.search(r'"estimated_cycles":"(\d+)"', line)
        if match and cycles:
            source = re.search(r'op_name="([^"]*)"', line)
            name = re.sub(r"\d+", "#", "/".join((source.group(1) if source else match.group(3)).split("/")[-3:]))
            count, total = totals.get(name, (0, 0))
            totals[name] = (count + 1, total + int(cycles.group(1)))
    rows = sorted(((name, *pair) for name, pair in totals.items()), key=lambda row: -row[2])
    return rows[:top]


def context_bytes_per_token(engine, batch):
    """(target, draft) K/V bytes of one token of context for all of a device's rows and heads."""
    target = engine.decoder.target
    rows = batch // target.placement.num_data

    def size(layout):
        total = 0
        for (k_heads, k_dim), (v_heads, v_dim), dtype in layout:
            split = target.placement.num_model if target.placement.split(k_heads) else 1
            total += (k_heads * k_dim + v_heads * v_dim) * jax.numpy.dtype(dtype).itemsize // split
        return rows * total

    draft = getattr(engine.decoder.proposer, "layout", ())
    return size(target.layout), size(draft)


def largest_context(report, chip, per_token, context):
    """Longest context (tokens) whose caches fit beside everything else of `report`, or 0.

    Args:
        per_token: K/V bytes of one token on a device, of target and draft.
        context: the one `report` was compiled for.
    """
    room = chip.hbm * _USABLE - report.total_bytes
    return max(0, int(context + room // per_token)) if per_token else 0


def fits(report, chip):
    return report.total_bytes <= chip.hbm * _USABLE
