"""cuBLASLt baselines through nvmath-python's bindings: plans, heuristic candidates, launchers.

Row-major Y[M, N] = X[M, K] W[N, K]^T is, in cuBLASLt's column-major view, D[N, M] = op(A) B with A = W as a K x N
matrix transposed and B = X as a K x M matrix (the TN form that FP8 requires).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# library_types.h and cublas_api.h
CUDA_R_32F, CUDA_R_16BF, CUDA_R_8F_E4M3 = 0, 14, 28
CUBLAS_COMPUTE_32F = 68
CUBLAS_OP_N, CUBLAS_OP_T = 0, 1

#: Other M whose heuristic answers are tried too.
NEIGHBOUR_M = (16, 64, 128, 256, 512, 1024, 4096)

#: cuBLASLt refuses a call whose scale pointers are not this aligned.
SCALE_STRIDE_BYTES = 256


@dataclass(frozen=True)
class Candidate:
    """One algorithm that the heuristic offers."""

    index: int
    algorithm: int
    algorithm_id: int
    tile: int
    stages: int
    split_k: int
    cluster: int
    workspace_bytes: int

    def describe(self) -> str:
        """One line for the record, in cuBLASLt's own enumerators."""
        return (
            f"#{self.index} algo {self.algorithm_id} tile {self.tile} stages {self.stages} "
            f"split-K {self.split_k} cluster {self.cluster} workspace {self.workspace_bytes}"
        )


@dataclass
class Plan:
    """Descriptors of one problem and its candidates. `chosen` is set by tuning."""

    m: int
    n: int
    k: int
    fp8: bool
    descriptor: int
    layouts: tuple[int, int, int]
    results: Any = field(repr=False)
    candidates: list[Candidate] = field(repr=False)
    refused: list[str] = field(default_factory=list)
    chosen: int | None = None


class CublasLt:
    """A handle with its workspace and device scales."""

    def __init__(
        self,
        workspace_bytes: int,
        weight_scale: float,
        activation_scale: float,
        fast_accumulation: bool,
    ) -> None:
        import cupy as cp
        from nvmath.bindings import cublasLt

        self._lt = cublasLt
        self.handle = cublasLt.create()
        self.workspace = cp.empty(workspace_bytes, dtype=cp.uint8)
        scales = np.zeros(2 * SCALE_STRIDE_BYTES // 4, dtype=np.float32)
        scales[0], scales[SCALE_STRIDE_BYTES // 4] = weight_scale, activation_scale
        self._scales = cp.asarray(scales)
        self._fast_accumulation = fast_accumulation

    def _set(self, setter: Callable, target: int, attribute: Any, value: np.ndarray) -> None:
        setter(target, int(attribute), value.ctypes.data, value.nbytes)

    def plan(self, m: int, n: int, k: int, fp8: bool, requested: int) -> Plan:
        """Descriptors and up to `requested` heuristic candidates of a problem (M, N, K)."""
        lt = self._lt
        operand = CUDA_R_8F_E4M3 if fp8 else CUDA_R_16BF
        descriptor = lt.matmul_desc_create(CUBLAS_COMPUTE_32F, CUDA_R_32F)
        attribute = lt.MatmulDescAttribute
        set_desc = lt.matmul_desc_set_attribute
        self._set(set_desc, descriptor, attribute.TRANSA, np.array([CUBLAS_OP_T], dtype=np.int32))
        self._set(set_desc, descriptor, attribute.TRANSB, np.array([CUBLAS_OP_N], dtype=np.int32))
        if fp8:
            base = int(self._scales.data.ptr)
            self._set(
                set_desc, descriptor, attribute.A_SCALE_POINTER, np.array([base], dtype=np.uint64)
            )
            self._set(
                set_desc,
                descriptor,
                attribute.B_SCALE_POINTER,
                np.array([base + SCALE_STRIDE_BYTES], dtype=np.uint64),
            )
            fast = np.array([int(self._fast_accumulation)], dtype=np.int8)
            self._set(set_desc, descriptor, attribute.FAST_ACCUM, fast)
        layouts = (
            lt.matrix_layout_create(operand, k, n, k),
            lt.matrix_layout_create(operand, k, m, k),
            lt.matrix_layout_create(CUDA_R_16BF, n, m, n),
        )
        results = self._heuristics(descriptor, layouts, operand, (m, n, k), requested)
        candidates = [self._candidate(results, index) for index in range(len(results))]
        if not candidates:
            raise RuntimeError(f"cuBLASLt offers no algorithm for M={m}, N={n}, K={k}, fp8={fp8}")
        return Plan(m, n, k, fp8, descriptor, layouts, results, candidates)

    def _heuristics(
        self,
        descriptor: int,
        layouts: tuple,
        operand: int,
        problem: tuple[int, int, int],
        requested: int,
    ) -> np.ndarray:
        """Distinct heuristic results that run on the problem, the library's own order first.

        A query returns about eight. More come from the heuristic's answers for other M, each checked by the library
        against the true problem (cublasLtMatmulAlgoCheck), so that the tuning budget of the protocol is met.
        """
        lt = self._lt
        m, n, k = problem
        a, b, d = layouts
        preference = lt.matmul_preference_create()
        self._set(
            lt.matmul_preference_set_attribute,
            preference,
            lt.MatmulPreferenceAttribute.MAX_WORKSPACE_BYTES,
            np.array([self.workspace.nbytes], dtype=np.uint64),
        )
        kept: dict[bytes, np.ndarray] = {}
        for other in dict.fromkeys((m, 2 * m, max(1, m // 2), 4 * m, max(1, m // 4), *NEIGHBOUR_M)):
            if len(kept) >= requested:
                break
            other_b = b if other == m else lt.matrix_layout_create(operand, k, other, k)
            other_d = d if other == m else lt.matrix_layout_create(CUDA_R_16BF, n, other, n)
            results = np.zeros(requested, dtype=lt.matmul_heuristic_result_dtype)
            returned = np.zeros(1, dtype=np.int32)
            with contextlib.suppress(lt.cuBLASLtError):  # the other M may have no algorithm
                lt.matmul_algo_get_heuristic(
                    self.handle, descriptor, a, other_b, other_d, other_d, preference, requested,
                    results.ctypes.data, returned.ctypes.data,
                )  # fmt: skip
            for index in range(int(returned[0])):
                self._keep_if_valid(kept, results[index : index + 1], descriptor, layouts)
            if other != m:
                lt.matrix_layout_destroy(other_b)
                lt.matrix_layout_destroy(other_d)
        lt.matmul_preference_destroy(preference)
        return np.concatenate(list(kept.values())[:requested]) if kept else np.zeros(0)

    def _keep_if_valid(
        self, kept: dict, result: np.ndarray, descriptor: int, layouts: tuple
    ) -> None:
        key = result["algo"].tobytes()
        if key in kept or result["state"][0] != 0:
            return
        a, b, d = layouts
        checked = result.copy()
        algorithm = result["algo"].copy()
        try:
            self._lt.matmul_algo_check(
                self.handle, descriptor, a, b, d, d, algorithm.ctypes.data, checked.ctypes.data
            )
        except self._lt.cuBLASLtError:
            return
        if checked["state"][0] == 0 and checked["workspace_size"][0] <= self.workspace.nbytes:
            checked["algo"] = algorithm
            kept[key] = checked

    def _candidate(self, results: np.ndarray, index: int) -> Candidate:
        address = results.ctypes.data + index * results.dtype.itemsize
        attribute = self._lt.MatmulAlgoConfigAttribute

        def read(name: Any) -> int:
            value = np.zeros(1, dtype=self._lt.get_matmul_algo_config_attribute_dtype(int(name)))
            written = np.zeros(1, dtype=np.uint64)
            self._lt.matmul_algo_config_get_attribute(
                address, int(name), value.ctypes.data, value.nbytes, written.ctypes.data
            )
            return int(value[0])

        return Candidate(
            index,
            address,
            read(attribute.ID),
            read(attribute.TILE_ID),
            read(attribute.STAGES_ID),
            read(attribute.SPLITK_NUM),
            read(attribute.CLUSTER_SHAPE_ID),
            int(results["workspace_size"][index]),
        )

    def launcher(
        self,
        plan: Plan,
        candidate: Candidate,
        weights: list[int],
        x: int,
        y: int,
        stream: int,
        alpha: float,
    ) -> Callable[[int], None]:
        """A call that enqueues Y = alpha X W^T with weight copy `copy`; allocates nothing.

        `weights`, `x`, `y`: device addresses; `stream`: a CUDA stream handle.
        """
        one = np.array([alpha], dtype=np.float32)
        zero = np.zeros(1, dtype=np.float32)
        a, b, d = plan.layouts
        matmul, handle, descriptor = self._lt.matmul, self.handle, plan.descriptor
        workspace, workspace_bytes = int(self.workspace.data.ptr), self.workspace.nbytes
        algorithm = candidate.algorithm
        alpha_address, beta_address = one.ctypes.data, zero.ctypes.data

        def launch(copy: int) -> None:
            matmul(
                handle, descriptor, alpha_address, weights[copy], a, x, b, beta_address,
                y, d, y, d, algorithm, workspace, workspace_bytes, stream,
            )  # fmt: skip

        launch.keeps_alive = (one, zero, plan.results)  # the addresses above point into these

        return launch
