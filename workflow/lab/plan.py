"""Points and arms of a campaign as a protocol plans them: what the plans of R1 and R2 share. Pure: no device.

A point is (shape, M). All arms of a point are interleaved in the same blocks, so a point stands once in a plan, with
the arms of every group that wants it. An N and K that one shape has is measured under that shape's name alone: a second
cell of the same problem would be a duplicate for every claim about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lab.protocol import point_seed, shuffled

FLOOR = "stream_read"
BASELINES = {"bf16": "cublaslt_bf16", "fp8_e4m3": "cublaslt_fp8"}
PEER = "peer/"

#: An arm by name: (kernel, format).
ArmName = tuple[str, str]
Groups = dict[str, tuple[ArmName, ...]]


@dataclass(frozen=True)
class Point:
    """One point. `groups` maps a group to its arms; an arm that two groups want is in both."""

    shape: Mapping[str, Any]
    m: int
    groups: Mapping[str, tuple[ArmName, ...]]
    further: bool = False

    @property
    def name(self) -> str:
        """Name in the journal."""
        return f"{self.shape['name']}/M{self.m}"

    @property
    def arms(self) -> tuple[ArmName, ...]:
        """Every arm once, in the order in which the blocks permute them."""
        return tuple(dict.fromkeys(arm for group in self.groups.values() for arm in group))

    @property
    def formats(self) -> tuple[str, ...]:
        """Formats of the weights that its arms need."""
        return tuple(dict.fromkeys(fmt for _, fmt in self.arms))


def points(
    protocol: Mapping[str, Any],
    shapes: Sequence[Mapping[str, Any]],
    peers: Mapping[str, Sequence[str]],
    groups_at: Callable[[Mapping[str, Any], int], Groups],
    ms_of: Callable[[Mapping[str, Any]], Sequence[int]] | None = None,
) -> list[Point]:
    """Every point in the frozen order: the shapes of prereg/shapes.json first, shape by shape, then the further ones.

    `shapes`: rows of prereg/shapes.json; `peers`: kernel id to formats of the adaptors that can run here; `groups_at`:
    the groups of a shape at an M; `ms_of`: the M of a shape, None: those of the plan. Shapes, and M within a shape, are
    in the order of the frozen seed.
    """
    found = []
    for shape in shuffled(shapes, point_seed(protocol, "shapes")):
        own = protocol["plan"]["m"] if ms_of is None else ms_of(shape)
        ms = shuffled(own, point_seed(protocol, shape["name"], "M"))
        found += [Point(shape, m, groups_at(shape, m)) for m in ms]
    further = shuffled(further_shapes(protocol, shapes), point_seed(protocol, "further"))
    for shape, row in further:
        arms = tuple(
            (kernel, fmt)
            for fmt, kernels in row["arms"].items()
            for kernel in kernels
            if not kernel.startswith(PEER) or fmt in peers.get(kernel, ())
        )
        ms = shuffled(row["m"], point_seed(protocol, shape["name"], "M"))
        found += [Point(shape, m, {row["group"]: arms}, further=True) for m in ms]
    return found


def production(plan: Mapping[str, Any], peers: Mapping[str, Sequence[str]]) -> Groups:
    """Floors, baselines and peers of a point."""
    return {
        "floors": tuple((FLOOR, fmt) for fmt in plan["floors"]),
        "baselines": tuple((BASELINES[fmt], fmt) for fmt in plan["baselines"]),
        "peers": tuple((kernel, fmt) for kernel in sorted(peers) for fmt in peers[kernel]),
    }


def add_rows(groups: Groups, rows: Iterable[Mapping[str, Any]], shape: str, m: int) -> None:
    """Add the arms of the rows of a plan that want a point; several rows can be of one group."""
    for row in rows:
        if m in row["m"] and shape in row["shapes"]:
            arms = tuple((kernel, row["format"]) for kernel in row["kernels"])
            groups[row["group"]] = groups.get(row["group"], ()) + arms


def check_names(named: Iterable[str], shapes: Sequence[Mapping[str, Any]]) -> None:
    """ValueError for a name of a plan that is no shape."""
    known = {s["name"] for s in shapes}
    if unknown := sorted(set(named) - known):
        raise ValueError(
            f"the plan names {', '.join(unknown)}: shapes are {', '.join(sorted(known))}"
        )


def further_shapes(
    protocol: Mapping[str, Any], shapes: Sequence[Mapping[str, Any]]
) -> list[tuple[dict[str, Any], Mapping[str, Any]]]:
    """(shape, row of the plan) for the shapes that only an experiment needs; each N and K once, the first name wins."""
    taken = {(s["N"], s["K"]) for s in shapes}
    found = []
    for row in protocol["plan"]["further"]:
        for shape in _named(row, shapes):
            if (shape["N"], shape["K"]) not in taken:
                taken.add((shape["N"], shape["K"]))
                found.append((shape, row))
    return found


def _named(row: Mapping[str, Any], shapes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if "of" not in row:
        return [_shape(row["name"].format(N=n), n, row["K"], row["group"]) for n in row["N"]]
    return [
        _shape(row["name"].format(shape=s["name"], ways=ways), s["N"] // ways, s["K"], row["group"])
        for s in shapes
        if s["name"] in row["of"]
        for ways in row["ways"]
        if s["N"] % (ways * row["n_multiple"]) == 0
    ]


def _shape(name: str, n: int, k: int, group: str) -> dict[str, Any]:
    return {"name": name, "N": n, "K": k, "set": group}
