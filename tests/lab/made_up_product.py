"""A made-up product, peer, timer and workshop: what measuring either part of R2 is tried with. No device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from made_up_arms import FakeArm, FakeTimer

from lab import campaign, measure_r2, product_arms
from lab.campaign import Activations
from lab.rows import AttemptRow


class Stream:
    """A stream that can be entered."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        pass


class Timer(FakeTimer):
    """Takes a chain too, which is no FakeArm: its launches are made, as nodes are."""

    def capture(self, launch: Any, copies: int, nodes: int) -> Any:
        if isinstance(getattr(launch, "__self__", None), FakeArm):
            return super().capture(launch, copies, nodes)
        for node in range(nodes):
            launch(node % copies)
        return FakeArm("qgemv_mx", "mxfp4", "product", 20.0)

    def loop_leg(self, launch: Any, copies: int, nodes: int) -> Any:
        return self._leg(self.capture(launch, copies, nodes), nodes, looped=True)


def bench(protocol: dict) -> Any:
    return SimpleNamespace(
        protocol=protocol, timer=Timer(), modules=SimpleNamespace(folder="cubins"),
        probe={"sm_count": 132}, random=None, lt=None, stream=Stream(), copies=lambda size: 3,
    )  # fmt: skip


@dataclass
class FakeProduct(FakeArm):
    """An arm of the product; `tuned` counts the searches."""

    tuned: int = 0
    refused: list[str] = field(default_factory=list)

    def tune(self, timer: Any) -> None:
        self.tuned += 1
        self.refused = ["a plan: random_fp64_before 2 > 1"]
        self.tuning = {"candidates": 24, "chosen": "made up", "heuristic_first_over_best": 1.01}


class FakePeer:
    """An adaptor that prepares as told."""

    formats, activations, requires = ("mxfp4", "nvfp4"), "bf16", {}
    NAME = "peer/humming_bf16"

    def prepare(self, weights: Any, copies: int) -> Any:
        return ("handle", weights.format, copies)

    def unsupported(self, fmt: str, n: int, k: int, m: int) -> None:
        return None


class Clock:
    """Seconds that pass by themselves, `step` at each look."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def workshops(
    monkeypatch: Any,
    protocol: dict,
    kind: type[campaign.Workshop],
    is_ablation: Callable[[str], bool],
) -> Callable[..., tuple[campaign.Workshop, list[str], list[tuple]]]:
    """What makes a workshop of a kind over made-up weights, baselines, peers and product, with its log and what was
    packed, in order.
    """

    def weights(random, fmt, n, k, copies):
        return SimpleNamespace(format=fmt, n=n, k=k, copies=copies)

    class Baseline(FakeArm):
        def __init__(self, w, *rest) -> None:
            kernel = "cublaslt_fp8" if w.format == "fp8_e4m3" else "cublaslt_bf16"
            super().__init__(kernel, w.format, "baseline", 7.0)

        def tune(self, timer) -> None:
            self.tuning = {"candidates": 32, "chosen": "made up"}

    class MadePeer(FakeArm):
        refused: tuple[str, ...] = ()

        def tune(self, timer) -> None:
            pass

    packed: list[tuple[str, int, int]] = []

    def pack(weights, stream):
        packed.append((weights.format, weights.n, weights.k))
        return SimpleNamespace(weights=weights)

    def product(kernel, packed, x, x64, stream, protocol):
        assert (x, x64) == ("bf16", "bf16 in FP64")
        role = "testbed" if is_ablation(kernel) else "product"
        return FakeProduct(kernel, packed.weights.format, role, 5.0)

    def chain(whole, problems, stream, protocol, programmatic):
        assert [p.weights.k for p, *_ in problems] == [4096, 4096, 4096, 14336]
        tuning = {"candidates": 1, "chosen": f"programmatic {programmatic}"}
        return FakeArm("qgemv_mx", whole.format, "product", 20.0, tuning=tuning)

    monkeypatch.setattr(campaign, "make_weights", weights)
    monkeypatch.setattr(measure_r2, "make_weights", weights)
    monkeypatch.setattr(
        campaign,
        "tune_stream",
        lambda t, m, w, p, s: FakeArm("stream_read", w.format, "floor", 4.0),
    )
    monkeypatch.setattr(campaign, "CublasLtArm", Baseline)
    monkeypatch.setattr(
        campaign, "make_arm", lambda peer, h, w, *rest: MadePeer(peer.NAME, w.format, "peer", 6.0)
    )
    monkeypatch.setattr(campaign, "free", lambda: None)
    monkeypatch.setattr(campaign.constants, "launch_floor", lambda *a: {})
    monkeypatch.setattr(product_arms.Packed, "of", pack)
    monkeypatch.setattr(product_arms, "make_arm", product)
    monkeypatch.setattr(product_arms.Chain, "of", chain)
    made = Activations("bf16", "fp8", "bf16 in FP64", "fp8 in FP64")
    monkeypatch.setattr(Activations, "make", lambda bench, m, k: made)

    def build(*peers: FakePeer) -> tuple[campaign.Workshop, list[str], list[tuple]]:
        said: list[str] = []
        notes: list[AttemptRow] = []
        shop = kind(bench(protocol), peers or (FakePeer(),), notes.append, said.append)
        return shop, said, packed

    return build
