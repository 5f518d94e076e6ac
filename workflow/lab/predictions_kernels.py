"""Claims of R1 to R3, written after a pilot of floors and baselines and before any 4-bit kernel existed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lab.claim_builder import DECODE_M, Shape, cell, claim, estimand, load_shapes, speedup
from lab.cost_model import CostModel, lognormal_quantiles

FORMATS = ("mxfp4", "nvfp4")
GEMM_M = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
PEER_M = (1, 16, 64, 256, 1024)
TESTBED_M = (1, 16, 64)
FP8, BF16 = ("cublaslt_fp8", "fp8_e4m3"), ("cublaslt_bf16", "bf16")
OUTSIDE = "An interval outside the 90% band."


def pilot(model: CostModel) -> dict[str, Any]:
    """What all claims of this freeze share."""
    return {"cost_model": model.version, "access": "pilot"}


def production_path(shapes: list[Shape], model: CostModel) -> Iterator[dict[str, Any]]:
    """R1: the production path over FP8, per cell."""
    arms = (
        ("peer/humming_bf16", "bf16", "mxfp4"),
        ("peer/humming_bf16", "bf16", "nvfp4"),
        ("peer/humming_fp8", "fp8", "mxfp4"),
    )
    for kernel, kind, fmt in arms:
        for shape in shapes:
            for m in PEER_M:
                n, k = shape.n, shape.k
                ratio = model.dense_us("fp8", m, n, k) / model.peer_us(kind, fmt, m, n, k)
                yield claim(
                    f"r1.production.{kernel.split('/')[1]}.{fmt}.{shape.name}.m{m}",
                    "point",
                    f"{kernel} in {fmt} over FP8 on {shape.name} at M={m}.",
                    speedup(kernel, fmt, *FP8, [(n, k, m)], "single"),
                    "ratio",
                    quantiles=lognormal_quantiles(ratio, 0.2),
                    formula="dense_us(fp8) / (soft_maximum(floor x peer_factor, compute / peer_efficiency) + peer_overhead_us)",
                    why="A good production kernel realises part of the byte ratio; with BF16 activations it loses the FP8 rate.",
                    refuted_by=OUTSIDE,
                    does_not_show="What the same path reaches inside a serving engine.",
                    family=f"r1.production.{kernel.split('/')[1]}",
                    **pilot(model),
                )  # fmt: skip


#: Predicted share of the gap at M=1, 16, 64 (median, half width of the 90% band), by cause.
SHARES = {
    "launch": ((0.16, 0.12), (0.15, 0.12), (0.11, 0.10)),
    "grid_fill": ((0.14, 0.13), (0.14, 0.13), (0.12, 0.12)),
    "weight_load": ((0.28, 0.20), (0.26, 0.20), (0.20, 0.18)),
    "layout_staging": ((0.14, 0.12), (0.14, 0.12), (0.13, 0.12)),
    "dequant_issue": ((0.15, 0.13), (0.17, 0.14), (0.20, 0.16)),
    "matrix_issue": ((0.04, 0.05), (0.06, 0.06), (0.16, 0.14)),
    "epilogue_reduction": ((0.09, 0.09), (0.08, 0.08), (0.08, 0.08)),
}


def causes(shapes: list[Shape], model: CostModel) -> Iterator[dict[str, Any]]:
    """R1: each cause's share of the gap, for the small and the large set."""
    for subset in ("frozen", "large"):
        for column, m in enumerate(TESTBED_M):
            for name, bands in SHARES.items():
                median, half = bands[column]
                scale = 0.6 if subset == "large" and name in ("launch", "grid_fill") else 1.0
                centre, width = median * scale, half * scale
                levels = (-1.0, -0.42, 0.0, 0.42, 1.0)
                quantiles = {
                    q: round(centre + level * width, 4)
                    for q, level in zip(("q05", "q25", "q50", "q75", "q95"), levels, strict=True)
                }
                yield claim(
                    f"r1.cause.{name}.{subset}.m{m}",
                    "share",
                    f"Share of {name} in the MXFP4 gap of the testbed at M={m}, over the {subset} shapes.",
                    estimand(
                        "share",
                        [
                            cell("testbed/full", "mxfp4", s.n, s.k, m)
                            for s in shapes
                            if s.set == subset
                        ],
                        aggregate="geomean",
                        name=name,
                    ),
                    "fraction",
                    quantiles=quantiles,
                    smallest_difference=0.05,
                    formula="Shapley share of the factorial, or the measured term, over the gap",
                    why="At M=1 the bytes in flight bound a small layer; instruction issue grows with M.",
                    refuted_by=OUTSIDE,
                    does_not_show="The share in another kernel than the testbed.",
                    family="r1.cause",
                    **pilot(model),
                )
    for m in TESTBED_M:
        yield claim(
            f"r1.closure.residual.m{m}",
            "threshold",
            f"The residual of the decomposition at M={m} stays within 10% of the gap (largest over the nine shapes).",
            estimand("constant", name=f"largest_residual_fraction_m{m}"),
            "fraction",
            direction="below",
            threshold=0.1,
            probability=0.45,
            formula="|time of the all-removed variant - floor| / gap, and counters' prediction against the time",
            why="Both closures of METHOD 4.",
            refuted_by="One shape with a larger residual: UNEXPLAINED.",
            does_not_show="That the named causes are the only possible names.",
            **pilot(model),
        )
    for name, median, sigma, why in (
        ("issue_slots_per_64_weights_testbed", 7.0, 0.35, "LOP3/PRMT, scale multiply and conversion in a production-style sequence."),
        ("nvfp4_over_mxfp4_dequant_time", 1.12, 0.08, "Twice the scales, and a multiply for an exponent add."),
        ("looped_over_graphed_testbed_2880_m1", 1.6, 0.3, "A CuPy launch took 5 us in the pilot; the kernel takes 3 to 5 us."),
    ):  # fmt: skip
        yield claim(
            f"r1.cause_detail.{name}",
            "point",
            f"{name} on the H200.",
            estimand("constant", name=name),
            "ratio" if "over" in name else "instructions",
            quantiles=lognormal_quantiles(median, sigma),
            formula="counted in SASS, or a ratio of measured times",
            why=why,
            refuted_by=OUTSIDE,
            does_not_show="What another dequant sequence costs.",
            **pilot(model),
        )


def kernel_cells(shapes: list[Shape], model: CostModel) -> Iterator[dict[str, Any]]:
    """R2: time, and speed-up over FP8, of both kernels in every cell."""
    plans = (
        ("qgemv_mx", DECODE_M, model.gemv_us, 0.11, "floor x gemv_factor x (1 + gemv_per_token (M - 1)) + gemv_overhead_us"),
        ("qgemm_mx", GEMM_M, model.gemm_us, 0.15, "soft_maximum(floor x gemm_memory_factor, compute / gemm_efficiency) + gemm_overhead_us"),
    )  # fmt: skip
    for kernel, ms, time_us, sigma, formula in plans:
        for fmt in FORMATS:
            for shape in shapes:
                for m in ms:
                    n, k = shape.n, shape.k
                    median = time_us(fmt, m, n, k)
                    shared = {
                        "formula": formula,
                        "refuted_by": OUTSIDE,
                        "does_not_show": "The time inside a model, where other kernels run beside it.",
                        **pilot(model),
                    }
                    yield claim(
                        f"r2.{kernel}.time.{fmt}.{shape.name}.m{m}",
                        "point",
                        f"{kernel} in {fmt} on {shape.name} at M={m}.",
                        estimand("time_us", [cell(kernel, fmt, n, k, m)]),
                        "us",
                        quantiles=lognormal_quantiles(median, sigma),
                        why="A fused kernel pays the floor and a fixed cost, and above the ridge the tensor cores.",
                        family=f"r2.{kernel}.time",
                        **shared,
                    )
                    yield claim(
                        f"r2.{kernel}.speedup.{fmt}.{shape.name}.m{m}",
                        "point",
                        f"{kernel} in {fmt} over FP8 on {shape.name} at M={m}.",
                        speedup(kernel, fmt, *FP8, [(n, k, m)], "single"),
                        "ratio",
                        quantiles=lognormal_quantiles(
                            model.dense_us("fp8", m, n, k) / median, sigma + 0.05
                        ),
                        why="The same, over the cuBLASLt time of the model.",
                        family=f"r2.{kernel}.speedup",
                        **shared,
                    )


def bars(shapes: list[Shape], model: CostModel) -> Iterator[dict[str, Any]]:
    """R2: the bars that this project set itself, as yes/no claims with an honest probability."""
    everything = [(s.n, s.k) for s in shapes]
    decode = [(n, k, m) for n, k in everything for m in DECODE_M]

    def bar(
        name: str,
        text: str,
        of: dict,
        direction: str,
        limit: float,
        chance: float,
        unit: str = "ratio",
    ) -> dict:
        return claim(
            f"r2.bar.{name}",
            "threshold",
            text,
            of,
            unit,
            direction=direction,
            threshold=limit,
            probability=chance,
            formula="the kernels' cells against the bar",
            why="A bar that the project set itself; the probability is what its authors believed.",
            refuted_by="The interval on the wrong side of the bar.",
            does_not_show="Why a bar is missed: the profiler's reason stands beside it.",
            **pilot(model),
        )

    for fmt, mean, least, chance in (("mxfp4", 1.88, 1.4, 0.15), ("nvfp4", 1.78, 1.35, 0.17)):
        of_mean = speedup("qgemv_mx", fmt, *FP8, decode, "geomean")
        of_least = speedup("qgemv_mx", fmt, *FP8, decode, "min")
        yield bar(f"gemv_fp8_geomean.{fmt}", f"qgemv_mx {fmt} over FP8: geometric mean of all decode cells.", of_mean, "above", mean, chance)  # fmt: skip
        yield bar(f"gemv_fp8_least.{fmt}", f"qgemv_mx {fmt} over FP8: the least decode cell.", of_least, "above", least, 0.45)  # fmt: skip
        peer = speedup("qgemv_mx", fmt, "peer/humming_bf16", fmt, decode, "min")
        yield bar(
            f"gemv_peer.{fmt}",
            f"qgemv_mx {fmt} beats humming in every decode cell.",
            peer,
            "above",
            1.0,
            0.6,
        )
    sizes = {s.name: s.n * s.k * 0.53125 for s in shapes}
    for name, chosen, limit, chance in (
        ("large", [s for s in shapes if sizes[s.name] >= 30e6], 1.20, 0.4),
        ("small", [s for s in shapes if sizes[s.name] < 30e6], 1.45, 0.35),
    ):
        cells = [cell("qgemv_mx", "mxfp4", s.n, s.k, m) for s in chosen for m in DECODE_M]
        of = estimand("floor_ratio", cells, aggregate="max")
        yield bar(f"gemv_floor.{name}", f"qgemv_mx over its floor, the worst {name} decode cell.", of, "below", limit, chance)  # fmt: skip
    for name, text, limit, chance, unit in (
        ("qgemv_m16_over_m1", "qgemv_mx MXFP4: time at M=16 over time at M=1, largest of the nine shapes.", 1.10, 0.5, "ratio"),
        ("chain_pdl_over_asymptote", "Decode chain with programmatic dependent launch over bytes at asymptotic bandwidth.", 1.20, 0.4, "ratio"),
        ("linear_host_overhead_us", "Host time of a plain Python call of linear.", 10.0, 0.5, "us"),
        ("dispatch_regret", "Dispatch choice over exhaustive search, geometric mean.", 1.03, 0.55, "ratio"),
    ):  # fmt: skip
        yield bar(name, text, estimand("constant", name=name), "below", limit, chance, unit)
    for m, against_fp8, against_bf16, chance_fp8, chance_bf16 in (
        (32, 1.6, 2.5, 0.4, 0.35),
        (64, 1.3, 2.0, 0.45, 0.4),
        (128, 0.95, 1.5, 0.5, 0.4),
        (256, None, 1.0, None, 0.6),
        (512, None, 1.0, None, 0.45),
        (1024, None, 1.0, None, 0.3),
        (8192, None, 1.0, None, 0.25),
    ):
        cells = [(n, k, m) for n, k in everything]
        for other, limit, chance in (
            (FP8, against_fp8, chance_fp8),
            (BF16, against_bf16, chance_bf16),
        ):
            if limit is not None:
                of = speedup("qgemm_mx", "mxfp4", *other, cells, "geomean")
                text = (
                    f"qgemm_mx MXFP4 over {other[0]} at M={m}: geometric mean of the nine shapes."
                )
                yield bar(f"gemm_{other[0]}.m{m}", text, of, "above", limit, chance)
        peer = speedup("qgemm_mx", "mxfp4", "peer/humming_bf16", "mxfp4", cells, "min")
        yield bar(f"gemm_peer.m{m}", f"qgemm_mx MXFP4 beats humming on all nine shapes at M={m}.", peer, "above", 1.0, 0.45)  # fmt: skip
    for name, other, median in (("fp8", FP8, 90.0), ("bf16", BF16, 700.0)):
        for shape in shapes:
            cells = [
                cell("linear", "mxfp4", shape.n, shape.k, m, baseline=other[0]) for m in GEMM_M
            ]
            reference = [cell(*other, shape.n, shape.k, m) for m in GEMM_M]
            yield claim(
                f"r2.crossover.{name}.{shape.name}",
                "point",
                f"M at which linear in MXFP4 stops being faster than {name} on {shape.name}.",
                estimand("crossover_m", cells, reference),
                "M",
                quantiles=lognormal_quantiles(median, 0.5),
                formula="log-linear crossing of the speed-up with 1",
                why="FP8 has twice the matrix rate; BF16 has the same, and only dequantisation is lost.",
                refuted_by=OUTSIDE,
                does_not_show="Anything between the tabulated M.",
                family="r2.crossover_point",
                **pilot(model),
            )


def grouped_and_dsl(model: CostModel) -> Iterator[dict[str, Any]]:
    """R3: grouped decode bandwidth and the price of a DSL."""
    for name, median, sigma in (
        ("grouped_decode_bandwidth_fraction_gpt_oss_m1", 0.52, 0.25),
        ("grouped_decode_bandwidth_fraction_gpt_oss_m64", 0.78, 0.15),
        ("grouped_decode_bandwidth_fraction_deepseek_v4_flash_m1", 0.55, 0.25),
        ("grouped_decode_bandwidth_fraction_deepseek_v4_flash_m64", 0.82, 0.12),
        ("grouped_decode_bandwidth_fraction_qwen35_m1", 0.4, 0.3),
        ("grouped_decode_bandwidth_fraction_qwen35_m64", 0.72, 0.18),
        ("grouped_skew_zipf_over_uniform_time", 1.05, 0.15),
        ("grouped_over_looped_experts_speedup_m16", 2.6, 0.35),
        ("dsl_triton_gemv_time_over_cuda", 1.55, 0.2),
        ("dsl_triton_gemm_m128_time_over_cuda", 1.4, 0.2),
        ("dsl_triton_lines_over_cuda", 0.3, 0.35),
        ("dsl_cute_gemm_m128_time_over_cuda", 1.15, 0.15),
    ):
        yield claim(
            f"r3.{'grouped' if name.startswith('grouped') else 'dsl'}.{name}",
            "point",
            f"{name} on the H200.",
            estimand("constant", name=name),
            "ratio",
            quantiles=lognormal_quantiles(median, sigma),
            formula="bytes of the experts that are hit / (time x read_bandwidth), or a ratio of times or lines",
            why="Many small experts fill the machine only together; a DSL hides the fragment layout.",
            refuted_by=OUTSIDE,
            does_not_show="End-to-end serving throughput.",
            **pilot(model),
        )


def build_r1_r3(prereg_dir: Path) -> list[dict[str, Any]]:
    """The second freeze."""
    shapes, model = load_shapes(prereg_dir), CostModel.load(prereg_dir, "v2")
    return [
        *production_path(shapes, model),
        *causes(shapes, model),
        *kernel_cells(shapes, model),
        *bars(shapes, model),
        *grouped_and_dsl(model),
    ]
