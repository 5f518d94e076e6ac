"""Claims of the first freeze: the source's predictions of all rungs, and ours for R0, before any run on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lab.claim_builder import (
    DECODE_M,
    SOURCE,
    SOURCE_REGISTERED,
    Shape,
    cell,
    claim,
    estimand,
    load_shapes,
    speedup,
)
from lab.cost_model import CostModel, lognormal_quantiles
from qgemm_mx.formats import weight_bytes

# --- The source's predictions, with their provenance ----------------------------------------------


def source_claims(shapes: list[Shape]) -> Iterator[dict[str, Any]]:
    """P1 to P7 and the crossover claims of the source project, as data.

    The source gave numbers, not probabilities: where a band or a probability is needed it is ours, and the text says so.
    """
    six = [s for s in shapes if s.set == "frozen"]
    given = {"int4_g128": 0.5156, "mxfp4": 0.53125, "nvfp4": 0.5625, "fp8_e4m3": 1.0, "bf16": 2.0}
    common = {"source": SOURCE, "registered": SOURCE_REGISTERED}

    for fmt, value in given.items():
        yield claim(
            f"r0.p1.bytes_per_weight.{fmt}",
            "equivalence",
            f"A {fmt} weight takes {value} bytes, scales included.",
            estimand("bytes_per_weight", name=fmt),
            "bytes",
            novelty="mechanical",
            probability=0.99,
            threshold=value,
            smallest_difference=0.0001,
            formula="element bits / 8 + scale bytes / group",
            why="Arithmetic of the format. The source writes FP16; BF16 has the same 2 bytes.",
            refuted_by="A packer that stores more or fewer bytes.",
            does_not_show="That a kernel moves no more than these bytes.",
            **common,
        )
    yield claim(
        "r0.p2.crossover_m.mxfp4",
        "point",
        "The compute-bound crossover of MXFP4 with BF16 activations lies at M of about 44 on sm_90.",
        estimand("constant", name="crossover_m_mxfp4"),
        "M",
        quantiles={"q05": 34.0, "q25": 40.0, "q50": 44.0, "q75": 48.0, "q95": 56.0},
        smallest_difference=2.0,
        formula="M = ridge_bf16 * 0.53125 / 2",
        why="Assumed ridge 165 FLOP/B. The source gave the point; the band is this project's.",
        refuted_by="A measured ridge far from 165 FLOP/B.",
        does_not_show="That any kernel reaches the roofline at that M.",
        **common,
    )
    decode = [(s.n, s.k, m) for s in six for m in DECODE_M]
    yield claim(
        "r2.p2.ideal_to_m16",
        "threshold",
        "MXFP4 stays above 85% of ideal bandwidth up to M=16 on the frozen six.",
        estimand("floor_ratio", [cell("linear", "mxfp4", *p) for p in decode], aggregate="max"),
        "ratio",
        direction="below",
        threshold=1.0 / 0.85,
        probability=0.5,
        formula="time / size-matched floor < 1/0.85 in every cell",
        why="Below the crossover the time is weight traffic. Probability assigned by this project: the source gave none.",
        refuted_by="One cell at or above 1.18x its floor.",
        does_not_show="Anything about M above 16.",
        **common,
    )
    for m, limit, direction, text in (
        (64, 1.0 / 0.85, "above", "has degraded below 85% of ideal by M=64"),
        (128, 2.0, "above", "is clearly compute-bound by M=128: over twice its memory floor"),
    ):
        yield claim(
            f"r2.p2.compute_bound_m{m}",
            "threshold",
            f"MXFP4 {text}.",
            estimand(
                "floor_ratio",
                [cell("linear", "mxfp4", s.n, s.k, m) for s in six],
                aggregate="geomean",
            ),
            "ratio",
            direction=direction,
            threshold=limit,
            probability=0.9,
            formula="max(memory, compute) / floor",
            why="Crossover near M=44. Probability, and 2.0 for `clearly`, assigned by this project.",
            refuted_by="A geometric mean under the limit.",
            does_not_show="Where exactly the crossover lies.",
            **common,
        )
    small = [(s.n, s.k, m) for s in six for m in (1, 2, 4)]
    first = [(s.n, s.k, 1) for s in six]
    yield claim(
        "r2.p3.central",
        "threshold",
        "A correctly written MXFP4 weight-only GEMM on sm_90 exceeds 1.5x FP8 at M <= 4 on the frozen six.",
        speedup("linear", "mxfp4", "cublaslt_fp8", "fp8_e4m3", small, "geomean"),
        "ratio",
        direction="above",
        threshold=1.5,
        probability=0.75,
        formula="(8 / 4.25) x realised fraction of the byte ratio",
        why="Decode time is weight traffic, and MXFP4 moves 1.88x fewer bytes. Probability assigned by this project.",
        refuted_by="A geometric mean of at most 1.5.",
        does_not_show="That every cell exceeds 1.5x.",
        **common,
    )
    yield claim(
        "r2.p3.falsification",
        "threshold",
        "The best kernel reaches 1.2x FP8 at M=1 (the source's falsification rule for P3).",
        speedup("linear", "mxfp4", "cublaslt_fp8", "fp8_e4m3", first, "geomean"),
        "ratio",
        direction="above",
        threshold=1.2,
        probability=0.95,
        formula="as P3",
        why="Below 1.2x the central claim counts as falsified. Probability assigned by this project.",
        refuted_by="A geometric mean below 1.2 at M=1.",
        does_not_show="That P3 itself holds.",
        **common,
    )
    yield claim(
        "r1.p3.production_path",
        "equivalence",
        "Today's production MXFP4 path is about as fast as FP8 at M <= 4 on the frozen six (about 1.0x).",
        speedup("peer/humming_bf16", "mxfp4", "cublaslt_fp8", "fp8_e4m3", small, "geomean"),
        "ratio",
        probability=0.3,
        smallest_difference=0.1,
        formula="time(FP8) / time(production)",
        why="The source's central premise. Margin and probability are this project's.",
        refuted_by="A geometric mean outside 0.9 to 1.1.",
        does_not_show="What any other production stack does.",
        **common,
    )
    yield claim(
        "r1.p4.cause_ranking",
        "ordering",
        "The gap at M=1 is ranked: wave quantisation, launch and dispatch, layout staging, dequantisation issue.",
        estimand("share", name="grid_fill > launch > layout_staging > dequant_issue"),
        "fraction",
        direction="above",
        probability=0.15,
        formula="Shapley share of the gap a cause",
        why="The source's ranking; the W4A8 literature says dequantisation dominates. Probability is this project's.",
        refuted_by="Any neighbouring pair in the opposite order.",
        does_not_show="The size of each share.",
        **common,
    )
    pair = speedup("qgemv_mx", "mxfp4", "qgemv_mx", "nvfp4", first, "geomean")
    for suffix, direction, limit, text, probability in (
        ("mxfp4_faster", "above", 1.0, "MXFP4 runs faster than NVFP4 at M=1", 0.93),
        ("under_8_percent", "below", 1.08, "by less than 8% in throughput", 0.8),
    ):
        yield claim(
            f"r2.p5.{suffix}",
            "threshold",
            f"{text} (exponent add against multiply).",
            pair,
            "ratio",
            direction=direction,
            threshold=limit,
            probability=probability,
            smallest_difference=0.01,
            formula="time(NVFP4) / time(MXFP4); the bytes alone give 1.059",
            why="One scale a 32 against one a 16, and a shift against a multiply. Probability is this project's.",
            refuted_by="The interval on the other side of the limit.",
            does_not_show="The cost of dequantisation alone.",
            **common,
        )
    yield claim(
        "r1.p5.mxfp4_less_accurate",
        "threshold",
        "MXFP4 has a larger weight error than NVFP4 on the same weights.",
        estimand("constant", name="weight_error_mxfp4_over_nvfp4"),
        "ratio",
        direction="above",
        threshold=1.0,
        probability=0.97,
        formula="relative RMS weight error, MXFP4 over NVFP4",
        why="Power-of-two scales on twice the group. Probability is this project's.",
        refuted_by="A ratio of at most 1.",
        does_not_show="A difference in any task's quality.",
        **common,
    )
    yield claim(
        "r2.p6.looped_over_graphed",
        "threshold",
        "At M=1 a 2880x2880 MXFP4 GEMM takes over 2.0x longer looped than graphed.",
        estimand(
            "regime_ratio",
            [cell("linear", "mxfp4", 2880, 2880, 1)],
            [cell("linear", "mxfp4", 2880, 2880, 1, "cold_loop")],
        ),
        "ratio",
        direction="above",
        threshold=2.0,
        probability=0.85,
        formula="time(cold_loop) / time(cold_graph)",
        why="The host needs longer to launch than the device to run. Probability is this project's.",
        refuted_by="A ratio of at most 2.",
        does_not_show="What a C++ host loop would cost.",
        **common,
    )
    yield claim(
        "r3.p7.triton_twin",
        "point",
        "A Triton twin reaches 50 to 75% of the tuned CUDA kernel at M=1 on the frozen six.",
        speedup("peer/triton_twin", "mxfp4", "qgemv_mx", "mxfp4", first, "geomean"),
        "ratio",
        quantiles={"q05": 0.5, "q25": 0.58, "q50": 0.625, "q75": 0.68, "q95": 0.75},
        formula="time(qgemv_mx) / time(Triton twin)",
        why="Triton cannot control the fragment layout. The source gave the range; it is taken as the 90% band.",
        refuted_by="A ratio outside 0.5 to 0.75.",
        does_not_show="What another author's Triton kernel reaches.",
        **common,
    )
    for m, limit in ((32, 1.2), (64, 1.0)):
        yield claim(
            f"r2.crossover.fp8_m{m}",
            "threshold",
            f"MXFP4 over FP8 has fallen under {limit}x by M={m} on the frozen six.",
            speedup(
                "linear",
                "mxfp4",
                "cublaslt_fp8",
                "fp8_e4m3",
                [(s.n, s.k, m) for s in six],
                "geomean",
            ),
            "ratio",
            direction="below",
            threshold=limit,
            probability=0.4,
            formula="max(bytes, BF16 compute) against max(bytes, FP8 compute)",
            why="BF16 tensor work costs twice FP8's. Probability is this project's.",
            refuted_by=f"A geometric mean of at least {limit}.",
            does_not_show="The crossover of a single shape.",
            **common,
        )


# --- R0: what the instrument should find on an H200 -----------------------------------------------

CONSTANTS = {
    # name: (unit, quantiles, novelty, formula, why)
    "read_bandwidth_tbps": ("TB/s", (4.05, 4.28, 4.40, 4.50, 4.66), "blind", "0.92 x 4.8", "Read-only HBM3e streams reach 89 to 95% of the datasheet."),
    "l2_read_bandwidth_tbps": ("TB/s", (4.5, 5.6, 6.6, 7.8, 10.0), "blind", "1.5 x DRAM", "16 MiB in one graph node is half ramp; the asymptote of L2 would be higher."),
    "launch_floor_us": ("us", (0.8, 1.0, 1.25, 1.6, 2.3), "blind", "kernel to kernel in a graph", "Dependent graph nodes on Hopper are about a microsecond apart."),
    "launch_floor_grid1056_us": ("us", (0.95, 1.25, 1.6, 2.1, 3.0), "blind", "launch_floor + block launch", "Eight blocks an SM are still one wave."),
    "launch_loop_us": ("us", (2.2, 3.2, 4.4, 6.0, 9.5), "blind", "host cost of a CuPy launch", "Python and the driver need a few microseconds a launch."),
    "bf16_peak_tflops": ("TFLOP/s", (650.0, 710.0, 750.0, 785.0, 840.0), "seen", "power-capped dense product", "An outside figure of about 790 was known."),
    "fp8_peak_tflops": ("TFLOP/s", (1120.0, 1270.0, 1370.0, 1470.0, 1620.0), "blind", "1.83 x BF16", "FP8 doubles the rate and hits the power limit first."),
    "ridge_bf16_flop_per_byte": ("FLOP/B", (148.0, 163.0, 171.0, 180.0, 198.0), "blind", "bf16_peak / read_bandwidth", "The source assumed 165."),
    "ridge_fp8_flop_per_byte": ("FLOP/B", (255.0, 290.0, 312.0, 338.0, 380.0), "blind", "fp8_peak / read_bandwidth", "As above."),
}  # fmt: skip


def r0_claims(shapes: list[Shape], model: CostModel) -> Iterator[dict[str, Any]]:
    """Device constants, floors, baselines, the naive path and correctness, before any run on a GPU."""
    for name, (unit, values, novelty, formula, why) in CONSTANTS.items():
        yield claim(
            f"r0.constant.{name}",
            "point",
            f"{name} of an H200.",
            estimand("constant", name=name),
            unit,
            quantiles=dict(zip(("q05", "q25", "q50", "q75", "q95"), values, strict=True)),
            novelty=novelty,
            cost_model=model.version,
            formula=formula,
            why=why,
            refuted_by="An interval outside the 90% band.",
            does_not_show="The constant of another card or power limit.",
        )
    for shape in shapes:
        yield from _r0_shape(shape, model)
    large = [s for s in shapes if s.set == "large"]
    yield claim(
        "r0.harness.bf16_near_floor",
        "threshold",
        "BF16 at M=1 on the large shapes comes within 6% of the size-matched stream floor.",
        estimand(
            "floor_ratio",
            [cell("cublaslt_bf16", "bf16", s.n, s.k, 1) for s in large],
            aggregate="geomean",
        ),
        "ratio",
        direction="below",
        threshold=1.06,
        probability=0.7,
        cost_model=model.version,
        formula="time / floor",
        why="At over 160 MB a GEMV is a stream: this validates denominator and harness together.",
        refuted_by="A geometric mean over 1.06.",
        does_not_show="Anything about small shapes.",
    )
    decode = [(s.n, s.k, m) for s in shapes for m in DECODE_M]
    yield claim(
        "r0.baseline.fp8_over_bf16_decode",
        "point",
        "FP8 over BF16, geometric mean of all shapes at M <= 16.",
        speedup("cublaslt_fp8", "fp8_e4m3", "cublaslt_bf16", "bf16", decode, "geomean"),
        "ratio",
        quantiles={"q05": 1.3, "q25": 1.5, "q50": 1.62, "q75": 1.74, "q95": 1.88},
        cost_model=model.version,
        formula="dense_us(bf16) / dense_us(fp8)",
        why="Half the bytes, behind the same fixed cost.",
        refuted_by="An interval outside the band.",
        does_not_show="A single shape's ratio.",
    )
    for fmt in ("mxfp4", "nvfp4", "int4_g128", "int4_g64"):
        for check, probability in (
            ("decode_bits", 0.97),
            ("probe_one_hot", 0.97),
            ("probe_ramp", 0.97),
        ):
            yield claim(
                f"r0.correctness.{check}.{fmt}",
                "correctness",
                f"The reference kernel passes {check} in {fmt} on the device.",
                estimand("check", [cell("reference", fmt, 2880, 3584, 3)], name=check),
                "bool",
                direction="above",
                probability=probability,
                smallest_difference=0.0,
                formula="bit-for-bit equality with the host",
                why="The kernel repeats the packer's arithmetic.",
                refuted_by="One bit.",
                does_not_show="The correctness of a fast kernel.",
            )


def _r0_shape(shape: Shape, model: CostModel) -> Iterator[dict[str, Any]]:
    n, k = shape.n, shape.k
    base = {"cost_model": model.version, "refuted_by": "An interval outside the 90% band."}
    for fmt in ("mxfp4", "fp8_e4m3", "bf16"):
        yield claim(
            f"r0.floor.{fmt}.{shape.name}",
            "point",
            f"Cold read-only stream of the {fmt} bytes of {shape.name}.",
            estimand("time_us", [cell("stream_read", fmt, n, k, 1)]),
            "us",
            quantiles=lognormal_quantiles(model.floor_us(fmt, n, k), 0.12),
            formula="ramp_us + bytes / read_bandwidth",
            why="A cold stream pays a launch and a ramp, then the asymptote.",
            does_not_show="That a kernel which also computes can reach it.",
            **base,
        )
    for kind, fmt in (("fp8", "fp8_e4m3"), ("bf16", "bf16")):
        for m, sigma in ((1, 0.2), (64, 0.22), (1024, 0.15), (8192, 0.1)):
            yield claim(
                f"r0.baseline.cublaslt_{kind}.{shape.name}.m{m}",
                "point",
                f"Best cuBLASLt {kind} time of {shape.name} at M={m}.",
                estimand("time_us", [cell(f"cublaslt_{kind}", fmt, n, k, m)]),
                "us",
                quantiles=lognormal_quantiles(model.dense_us(kind, m, n, k), sigma),
                formula="max(floor x memory_factor, compute / tile fill) + overhead",
                why="Memory-bound below the ridge, compute-bound above, a fixed cost on both.",
                does_not_show="That another library is not faster.",
                family=f"r0.baseline.{kind}",
                **base,
            )
    yield claim(
        f"r0.baseline.hot_over_cold.{shape.name}",
        "point",
        f"FP8 at M=1 on {shape.name}: time cold over time hot.",
        estimand(
            "regime_ratio",
            [cell("cublaslt_fp8", "fp8_e4m3", n, k, 1, "hot_graph")],
            [cell("cublaslt_fp8", "fp8_e4m3", n, k, 1)],
        ),
        "ratio",
        quantiles=lognormal_quantiles(1.25 if weight_bytes("fp8_e4m3", n, k) < 30e6 else 1.06, 0.1),
        formula="L2-resident weights read faster than DRAM",
        why="A weight under half of L2 stays there between replays.",
        does_not_show="What a real decode step sees: it is cold.",
        **base,
    )
    for fmt in ("mxfp4", "nvfp4"):
        dequant = model.stream_us(weight_bytes(fmt, n, k)) + 2 * n * k / (
            model.parameters["dequant_write_tbps"] * 1e6
        )
        ratio = model.dense_us("bf16", 1, n, k) / (model.dense_us("bf16", 1, n, k) + dequant)
        yield claim(
            f"r0.naive.{fmt}.{shape.name}",
            "point",
            f"Naive dequantise-then-cuBLAS {fmt} over BF16 on {shape.name} at M=1 (below 1: slower).",
            speedup("naive_dequant", fmt, "cublaslt_bf16", "bf16", [(n, k, 1)], "single"),
            "ratio",
            quantiles=lognormal_quantiles(ratio, 0.18),
            formula="dense / (dense + read 4-bit + write 16-bit)",
            why="It moves 2 x 2 + 0.53 bytes a weight instead of 2.",
            does_not_show="What a fused kernel does.",
            family="r0.naive",
            **base,
        )


def build_r0(prereg_dir: Path) -> list[dict[str, Any]]:
    """The first freeze: the source's predictions of all rungs, and ours for R0."""
    shapes = load_shapes(prereg_dir)
    return [*source_claims(shapes), *r0_claims(shapes, CostModel.load(prereg_dir, "v1"))]
