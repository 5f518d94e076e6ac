"""What an adaptor of a peer offers. A module of this folder whose name does not start with `_` is one adaptor.

A peer is a production kernel that the project did not write. An adaptor imports its packages inside its functions, so
that it can be read, and named as not installed, on a machine that has none of them.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from lab.operands import WeightCopies
from qgemm_mx.formats import FORMATS

#: Activations that an adaptor can ask for: BF16 bit patterns (uint16 [M, K]), or E4M3 codes (uint8 [M, K]) under one
#: scale, `lab.operands.FP8_ACTIVATION_SCALE`.
ACTIVATIONS = ("bf16", "fp8")

#: A name that an adaptor may have beside those of `Peer`: `warm(work, budget)` compiles ahead, and in parallel, what
#: `bind` would compile for each (handle, rows of X) of `work`. It may raise: `bind` then says what does not compile.
WARM = "warm"

#: How a candidate adds up its products: the correctness gate takes `eps_acc_<this>` of the protocol.
ACCUMULATIONS = ("fp32", "fp8_fast")


class PeerError(RuntimeError):
    """An adaptor that is none, or a peer that cannot do what it was asked."""


@dataclass(frozen=True)
class Availability:
    """Whether a peer can run here, the versions of its packages, and why it cannot."""

    installed: bool
    version: str | None
    reason: str | None

    def __post_init__(self) -> None:
        if self.installed != (self.reason is None) or (self.installed and not self.version):
            raise PeerError(
                f"availability installed={self.installed} with version {self.version!r} and reason {self.reason!r}:"
                " an installed peer has a version and no reason, a missing one a reason"
            )


@dataclass
class Candidate:
    """One configuration of a peer, bound to operands. Calling it with a weight copy enqueues one product and no more.

    name          the configuration in words, for the record
    launch        enqueues one call; nothing is compiled, tuned or allocated in it
    accumulation  one of ACCUMULATIONS
    bf16_sums     whether slices of K are rounded to BF16 and added up in BF16 in the output
    seen          FP64 activations [M, K] that the product multiplied, where the call itself quantises them; else None
    """

    name: str
    launch: Callable[[int], None]
    accumulation: str = "fp32"
    bf16_sums: bool = False
    seen: Callable[[], Any] | None = None

    def __post_init__(self) -> None:
        if self.accumulation not in ACCUMULATIONS:
            raise PeerError(
                f"{self.name}: accumulation {self.accumulation!r} is not one of {', '.join(ACCUMULATIONS)}"
            )

    def __call__(self, copy: int) -> None:
        """Enqueue one call with weight copy `copy`."""
        self.launch(copy)


@runtime_checkable
class Peer(Protocol):
    """An adaptor: a module with these names."""

    NAME: str  #: kernel id, `peer/<name>`
    requires: Mapping[str, str]  #: distribution to module that must import, the peer's own first
    formats: Sequence[str]  #: weight formats that it takes
    activations: str  #: one of ACTIVATIONS: what `bind` gets as x

    def available(self) -> Availability:
        """Whether it can run on this machine. Never raises."""

    def unsupported(self, format: str, n: int, k: int, m: int) -> str | None:
        """Why the peer cannot do this problem, or None."""

    def prepare(self, weights: WeightCopies, copies: int) -> Any:
        """Weights in the peer's own layout, `copies` distinct ones, from packed operands on the device. Not timed."""

    def bind(self, handle: Any, x: Any, y: Any, stream: Any, budget: int) -> list[Candidate]:
        """Compiled configurations for Y = X W^T on `stream`, at most `budget`; the first is the peer's own choice.

        x: uint16 or uint8 [M, K], y: uint16 [M, N] BF16 bit patterns, both CuPy arrays that stay where they are.
        Everything that takes time (JIT, heuristics, allocation) happens here.
        """

    def describe(self, handle: Any) -> dict[str, Any]:
        """`version`, `prepared_bytes` of a weight copy, and `how` the configurations are chosen."""


NAME = re.compile(r"peer/[a-z0-9_]+")


def check_adaptor(module: Any) -> Peer:
    """The module as a Peer; PeerError says what it lacks."""
    where = getattr(module, "__name__", repr(module))
    wanted = [n for n in (*Peer.__annotations__, *vars(Peer)) if not n.startswith("_")]
    if missing := [n for n in wanted if not hasattr(module, n)]:
        raise PeerError(f"adaptor {where} lacks {', '.join(missing)}")
    if not NAME.fullmatch(module.NAME):
        raise PeerError(f"adaptor {where}: NAME {module.NAME!r} is not peer/<name>")
    if module.activations not in ACTIVATIONS:
        raise PeerError(
            f"adaptor {where}: activations {module.activations!r} is not one of {', '.join(ACTIVATIONS)}"
        )
    if unknown := sorted(set(module.formats) - set(FORMATS)) or not module.formats:
        raise PeerError(f"adaptor {where}: formats {list(module.formats)}, unknown: {unknown}")
    return module


def check_packages(requires: Mapping[str, str]) -> Availability:
    """Availability from the packages alone: each is installed and imports. The import may take seconds."""
    versions = []
    for distribution, module in requires.items():
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return Availability(False, None, f"package {distribution} is not installed")
        versions.append(f"{distribution} {version}")
        try:
            importlib.import_module(module)
        except Exception as error:  # a package that is there and broken must not end the campaign
            words = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            return Availability(
                False, ", ".join(versions), f"{versions[-1]} does not import ({words})"
            )
    return Availability(True, ", ".join(versions), None)
