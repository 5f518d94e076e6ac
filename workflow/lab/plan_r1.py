"""The points of the R1 campaign and the arms of each, as prereg/protocol_r1.json plans them. Pure: no device.

A point is (shape, M). All arms of a point are interleaved in the same blocks, so a point stands once in the plan, with
the arms of every group that wants it: floors, baselines, peers, the factorial with its probes, and the experiments on
single causes. An N and K that one shape has is measured under that shape's name alone: a second cell of the same
problem would be a duplicate for every claim about it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lab import decomposition
from lab.protocol import point_seed, shuffled

FLOOR, FULL = decomposition.FLOOR, decomposition.FULL
BASELINES = {"bf16": "cublaslt_bf16", "fp8_e4m3": "cublaslt_fp8"}
PEER = "peer/"
#: Groups in the order in which their arms stand in a point.
PRODUCTION = ("floors", "baselines", "peers")

#: An arm by name: (kernel, format).
ArmName = tuple[str, str]


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
) -> list[Point]:
    """Every point in the frozen order: the shapes of prereg/shapes.json first, shape by shape, then the further ones.

    `shapes`: rows of prereg/shapes.json; `peers`: kernel id to formats of the adaptors that can run here. Shapes, and M
    within a shape, are in the order of the frozen seed. ValueError for a name of the plan that is no shape.
    """
    found = []
    for shape in shuffled(shapes, point_seed(protocol, "shapes")):
        ms = shuffled(protocol["plan"]["m"], point_seed(protocol, shape["name"], "M"))
        found += [_point(protocol, shape, m, peers) for m in ms]
    _check_names(protocol, shapes)
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


def _point(
    protocol: Mapping[str, Any],
    shape: Mapping[str, Any],
    m: int,
    peers: Mapping[str, Sequence[str]],
) -> Point:
    plan = protocol["plan"]
    groups: dict[str, tuple[ArmName, ...]] = {
        "floors": tuple((FLOOR, fmt) for fmt in plan["floors"]),
        "baselines": tuple((BASELINES[fmt], fmt) for fmt in plan["baselines"]),
        "peers": tuple((kernel, fmt) for kernel in sorted(peers) for fmt in peers[kernel]),
    }
    factorial = plan["factorial"]
    if m in factorial["m"]:
        kernels = (*decomposition.variants(), *factorial["probes"])
        groups["factorial"] = tuple((kernel, factorial["format"]) for kernel in kernels)
    for row in plan["causes"]:
        if m in row["m"] and shape["name"] in row["shapes"]:
            arms = tuple((kernel, row["format"]) for kernel in row["kernels"])
            groups[row["group"]] = groups.get(row["group"], ()) + arms
    return Point(shape, m, groups)


def _check_names(protocol: Mapping[str, Any], shapes: Sequence[Mapping[str, Any]]) -> None:
    plan, known = protocol["plan"], {s["name"] for s in shapes}
    named = {n for row in plan["causes"] for n in row["shapes"]}
    named |= {n for row in plan["further"] for n in row.get("of", ())}
    if unknown := sorted(named - known):
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


def shards(
    protocol: Mapping[str, Any], shapes: Sequence[Mapping[str, Any]]
) -> dict[tuple[str, int], str]:
    """(shape, ways) to the name under which that shard of N / ways was measured, 1 way among them.

    A shard with the N and K of another shape is that shape: its cells carry that name.
    """
    measured = {(s["N"], s["K"]): s["name"] for s in shapes}
    measured |= {(s["N"], s["K"]): s["name"] for s, _ in further_shapes(protocol, shapes)}
    found = {}
    for row in protocol["plan"]["further"]:
        for s in shapes:
            if s["name"] in row.get("of", ()):
                for ways in (1, *row["ways"]):
                    name = measured.get((s["N"] // ways, s["K"]))
                    if name is not None and s["N"] % ways == 0:
                        found[s["name"], ways] = name
    return found


__all__ = ["ArmName", "Point", "further_shapes", "points", "shards"]
