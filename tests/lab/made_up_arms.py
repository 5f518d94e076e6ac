"""Made-up arms and a made-up timer: the measuring flow goes through the real protocol without a device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lab.timing import Leg
from qgemm_mx.probes import CheckResult


@dataclass
class FakeArm:
    """An arm with a known time. `broken` fails the named stage of the gate, `raises` raises in that step.

    Steps that can raise: before, capture, after.
    """

    kernel: str
    format: str
    role: str
    time_us: float
    copies: int = 3
    weight_bytes: int = 100
    tuning: dict[str, Any] | None = None
    broken: str = ""
    raises: str = ""
    claims_right: bool = True
    checked: list[tuple[int, str]] = field(default_factory=list)

    def launch(self, copy: int) -> None:
        """Nothing to enqueue."""

    def check(self, copy: int, stage: str) -> list[CheckResult]:
        self.checked.append((copy, stage))
        if stage == self.raises:
            raise ValueError(f"made up: {stage}")
        if not self.claims_right:
            return []
        bad = stage == self.broken
        return [CheckResult(f"random_fp64_{stage}", not bad, 2.0 if bad else 0.5, 1.0, "")]


class FakeTimer:
    """Gives every leg its arm's time, with noise; `clock` is the host clock in ns."""

    def __init__(self, noise: float = 0.003) -> None:
        self.random = np.random.default_rng(1)
        self.noise = noise
        self.clock = 0

    def capture(self, launch: Any, copies: int, nodes: int) -> Any:
        if launch.__self__.raises == "capture":
            raise ValueError("made up: capture")
        return launch.__self__

    def _leg(self, arm: FakeArm, nodes: int, looped: bool) -> Leg:
        start, self.clock = self.clock, self.clock + 1_000_000
        t_n = nodes * arm.time_us * float(np.exp(self.random.normal(0, self.noise)))
        t_2n = (
            float("nan")
            if looped
            else t_n + nodes * arm.time_us * float(np.exp(self.random.normal(0, self.noise)))
        )
        time = t_n / nodes if looped else (t_2n - t_n) / nodes
        return Leg(
            nodes, t_n, t_2n, time, float("nan") if looped else 2 * t_n - t_2n, start, self.clock
        )

    def graph_leg(self, graph_n: Any, graph_2n: Any, nodes: int, warm: bool) -> Leg:
        return self._leg(graph_n, nodes, looped=False)

    def loop_leg(self, launch: Any, copies: int, nodes: int) -> Leg:
        return self._leg(launch.__self__, nodes, looped=True)
