"""A peer as an arm: prepared, tuned and gated by correctness exactly as our own kernels, then timed beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lab.arms import Truth, pick_fastest, poisoned_call
from lab.journal import utc_now
from lab.operands import WeightCopies, decode_activations
from lab.peers import Candidate, Peer, PeerError
from lab.protocol import tuning_nodes
from lab.rows import AttemptRow
from lab.timing import Timer
from qgemm_mx.probes import CheckResult

#: Reasons that start an attempt row of a peer that was not measured.
NOT_INSTALLED = "NOT_INSTALLED"
NOT_SUPPORTED = "NOT_SUPPORTED"

#: Configurations that a peer may try at a point.
BUDGET = 3

#: E4M3 has 3 mantissa bits and the subnormal step 2^-9: half a step of each, and a little for the FP32 scale.
E4M3_RELATIVE = 2.0**-4 * (1 + 2.0**-10)
E4M3_SUBNORMAL = 2.0**-10
E4M3_MAX = 448.0


@dataclass
class PeerArm:
    """Y = X W^T by a peer. `tune` before the first launch: it binds, gates every candidate, and keeps the fastest.

    x        what the peer asks for: BF16 bit patterns (uint16 [M, K]) or E4M3 codes (uint8 [M, K])
    handle   what `peer.prepare` made of the weights; shared by all M of a shape
    """

    peer: Peer
    handle: Any
    weights: WeightCopies
    x: Any
    x64: Any
    y: Any
    stream: Any
    protocol: dict[str, Any]
    budget: int = BUDGET
    role: str = "peer"
    tuning: dict[str, Any] | None = None
    refused: list[str] = field(default_factory=list)
    _chosen: Candidate | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.kernel = self.peer.NAME
        self.format = self.weights.format
        self.copies = self.weights.copies
        self.weight_bytes = self.weights.copy_bytes
        self.m = int(self.x.shape[0])
        if self.format not in self.peer.formats:
            raise PeerError(
                f"{self.kernel} takes {', '.join(self.peer.formats)}, not {self.format}"
            )

    def tune(
        self, timer: Timer, pick: Callable[..., tuple[int, list[float]]] = pick_fastest
    ) -> None:
        """Compile, gate and time the candidates cold; the fastest right one is kept.

        A candidate that is wrong here is never timed; `refused` names it. When all are wrong the peer's own choice
        stays, so that the gate records how wrong it is.
        """
        with self.stream:
            candidates = self.peer.bind(self.handle, self.x, self.y, self.stream, self.budget)
        if not candidates:
            raise PeerError(f"{self.kernel} offers no configuration for M={self.m}, {self.format}")
        right = [c for c in candidates if self._is_right(c)]
        self._chosen = candidates[0]
        gain = None
        if right:
            nodes = tuning_nodes(self.protocol, self.m, self.copies)
            best, medians = pick(timer, [c.launch for c in right], self.copies, nodes, 2)
            self._chosen = right[best]
            if right[0] is candidates[0]:
                gain = medians[0] / medians[best]
        self.tuning = {
            "candidates": len(candidates),
            "chosen": self._chosen.name,
            "heuristic_first_over_best": gain,
        }
        # A timed call goes straight to the candidate, as it does for the other arms.
        self.launch = self._chosen.launch

    def _is_right(self, candidate: Candidate) -> bool:
        try:
            results = self._check(candidate, 0, "tuning", call=True)
        except Exception as error:
            self.refused.append(f"{candidate.name}: {type(error).__name__}: {error}"[:300])
            return False
        wrong = [f"{r.name} {r.measured:.3g} > {r.limit:.3g}" for r in results if not r.passed]
        if wrong:
            self.refused.append(f"{candidate.name}: {'; '.join(wrong)}")
        return not wrong

    def launch(self, copy: int) -> None:
        """Replaced by `tune` with the launcher of the chosen candidate."""
        raise PeerError(f"{self.kernel} is not tuned yet")

    def check(self, copy: int, stage: str) -> list[CheckResult]:
        """`before`: poison, call, compare. `after`: compare what the last timed call left behind."""
        if self._chosen is None:
            raise PeerError(f"{self.kernel} is not tuned yet")
        return self._check(self._chosen, copy, stage, call=stage == "before")

    def _check(self, candidate: Candidate, copy: int, stage: str, call: bool) -> list[CheckResult]:
        if call:
            poisoned_call(self.stream, self.y, candidate, copy)
        self.stream.synchronize()
        results, x64 = [], self.x64
        if candidate.seen is not None:
            x64 = candidate.seen()
            results.append(quantiser_check(self.x64, x64, f"quantiser_{stage}"))
        truth = self.truth(candidate, copy, x64)
        return [truth.compare(self.y, f"random_fp64_{stage}"), *results]

    def truth(self, candidate: Candidate, copy: int, x64: Any) -> Truth:
        """FP64 result on the operands as the product sees them, and the frozen limit of its accumulation.

        A candidate that adds slices of K in BF16 gets u_partial_sums |x||w| / sqrt(K) more, the size of y times
        u_partial_sums, where the protocol has that number. Without it the limit is that of FP32 to the end.
        """
        limits = self.protocol["correctness"]
        eps = limits[f"eps_acc_{candidate.accumulation}"]
        if candidate.bf16_sums:
            eps += limits.get("u_partial_sums", 0.0) / self.weights.k
        return Truth.compute(x64, self.weights, copy, limits["u_out_bf16"], eps)

    def describe(self) -> dict[str, Any]:
        """Version, chosen configuration, tuning budget, and what was refused: for the record."""
        return {
            **self.peer.describe(self.handle),
            "kernel": self.kernel,
            "format": self.format,
            "chosen": None if self._chosen is None else self._chosen.name,
            "bf16_sums": None if self._chosen is None else self._chosen.bf16_sums,
            "budget": self.budget,
            "tuning": self.tuning,
            "not_timed": list(self.refused),
        }


def quantiser_check(x64: Any, seen: Any, name: str) -> CheckResult:
    """Whether `seen` is X rounded to E4M3 with one scale a row: worst error over half a step.

    x64, seen: float64 [M, K]. The row's scale is max|x| / 448, so the half step of a subnormal is 2^-10 of it.
    """
    # NumPy's functions hand CuPy arrays on to CuPy.
    peak = np.max(np.abs(x64), axis=1, keepdims=True)
    limit = E4M3_RELATIVE * np.abs(x64) + E4M3_SUBNORMAL * peak / E4M3_MAX
    # A row of zeros has the limit 0, and no error either.
    excess = np.where(seen == x64, 0.0, np.abs(seen - x64) / np.where(limit > 0, limit, 1e-300))
    worst = float(np.max(excess))
    return CheckResult(
        name, bool(worst <= 1.0), worst, 1.0, "max |error| / half a step of E4M3, per-row scale"
    )


def make_arm(
    peer: Peer,
    handle: Any,
    weights: WeightCopies,
    x_bf16: Any,
    x_fp8: Any,
    stream: Any,
    protocol: dict[str, Any],
    budget: int = BUDGET,
    x64: Any = None,
) -> PeerArm:
    """An arm with the activations that the peer asks for (`lab.operands.make_activations`) and its own output.

    x64: those activations in float64 where they are decoded already.
    """
    import cupy as cp

    x = x_fp8 if peer.activations == "fp8" else x_bf16
    x64 = decode_activations(x) if x64 is None else x64
    y = cp.empty((int(x.shape[0]), weights.n), dtype=cp.uint16)
    return PeerArm(peer, handle, weights, x, x64, y, stream, protocol, budget)


def missing_rows(
    peers: Iterable[Peer], formats: Iterable[str] | None = None, now: str | None = None
) -> tuple[list[Peer], list[AttemptRow]]:
    """The peers that can run here, and a row NOT_INSTALLED for each format of each that cannot: none is silent."""
    now = now or utc_now()
    wanted = None if formats is None else set(formats)
    usable, rows = [], []
    for peer in peers:
        availability = peer.available()
        if availability.installed:
            usable.append(peer)
            continue
        rows += [
            AttemptRow(
                stage="peer",
                status="refused",
                reason=f"{NOT_INSTALLED}: {availability.reason}",
                started_utc=now,
                seconds=0.0,
                kernel=peer.NAME,
                format=fmt,
            )
            for fmt in peer.formats
            if wanted is None or fmt in wanted
        ]
    return usable, rows


def unsupported_row(
    peer: Peer, format: str, shape: str, n: int, k: int, m: int, now: str | None = None
) -> AttemptRow | None:
    """A row NOT_SUPPORTED for a problem that an installed peer cannot do, or None."""
    reason = peer.unsupported(format, n, k, m)
    if reason is None:
        return None
    return AttemptRow(
        stage="peer",
        status="refused",
        reason=f"{NOT_SUPPORTED}: {reason}",
        started_utc=now or utc_now(),
        seconds=0.0,
        kernel=peer.NAME,
        format=format,
        shape=shape,
        N=n,
        K=k,
        M=m,
    )


__all__ = [
    "NOT_INSTALLED",
    "NOT_SUPPORTED",
    "PeerArm",
    "make_arm",
    "missing_rows",
    "quantiser_check",
    "unsupported_row",
]
