"""What a 4-bit format costs in accuracy on real weights: measured once on the CPU, recorded, then only read.

Three errors of a small public encoder (lab.minilm) whose linear weights go through a format and back; biases, norms,
embeddings and activations stay as they are:

weight error   |Wq - W| / |W| of a layer (Frobenius norms)
output error   |X (Wq - W)^T| / |X W^T| of a layer, X its input in the unquantised model, without bias
cosine         between the embeddings of a sentence by the unquantised and by the wholly quantised model

`data/accuracy/<id>/accuracy.json` holds one number a layer or sentence; every aggregate is computed from it on reading.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import rfc8785
from jsonschema import Draft202012Validator

from lab import files, minilm
from lab.files import sha256
from lab.journal import utc_now
from lab.minilm import Encoder
from qgemm_mx.formats import FORMATS
from qgemm_mx.packing import dequantize, quantize

WORKFLOW = Path(__file__).resolve().parents[1]
SCHEMA = WORKFLOW / "schemas" / "accuracy.schema.json"
SENTENCES = WORKFLOW / "lab" / "sentences.txt"
FOLDER, FILE = "accuracy", "accuracy.json"
MODEL = "all-minilm-l6-v2"

# Every format under every rule by which its scales can be chosen.
SCHEMES = tuple((fmt.name, rule) for fmt in FORMATS.values() for rule in fmt.scale_rules)

CODE = {
    "formats": ("kernels/qgemm_mx/formats.py", "kernels/qgemm_mx/packing.py"),
    "experiment": ("workflow/lab/minilm.py", "workflow/lab/accuracy.py"),
}
SOFTWARE = ("numpy", "scipy", "tokenizers", "safetensors")
DIGITS = 6  # sums in another order, on another machine, differ near the 13th digit


class AccuracyError(Exception):
    """A record that is not what it must be; the message names it and the reason."""


# ---- measuring ---------------------------------------------------------------------------------------------------


def relative_error(approximate: np.ndarray, exact: np.ndarray) -> float:
    """|approximate - exact| / |exact| in float64: the relative RMS error. ValueError for an `exact` of zeros."""
    exact = np.asarray(exact, np.float64)
    scale = np.linalg.norm(exact)
    if scale == 0:
        raise ValueError(f"exact {list(exact.shape)} is all zero: no error is relative to it")
    return float(np.linalg.norm(approximate - exact) / scale)


def through(weight: np.ndarray, format: str, rule: str) -> np.ndarray:
    """Weight float32 [N, K] quantised and dequantised, float64: what a kernel multiplies by."""
    return dequantize(quantize(weight, format, rule), np.float64)


def cosine_distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """1 - cosine of each pair of unit rows, [sentences]: half of the squared distance, which does not cancel."""
    return ((a - b) ** 2).sum(axis=1) / 2


def measure(
    encoder: Encoder,
    sentences: Sequence[Sequence[int]],
    schemes: Iterable[tuple[str, str]] = SCHEMES,
) -> dict[str, list[dict[str, Any]]]:
    """The parts `layers` and `schemes` of a record, from token ids; numbers have 6 digits."""
    inputs: dict[str, np.ndarray] = {}
    exact = minilm.embed(encoder, sentences, inputs.__setitem__)
    weights = {name: encoder.weight(name) for name in encoder.linear_layers}
    outputs = {name: inputs[name] @ w.T.astype(np.float64) for name, w in weights.items()}
    layers = [
        {
            "layer": name,
            "n": weight.shape[0],
            "k": weight.shape[1],
            "weight_energy": _energy(weight),
            "output_energy": _energy(outputs[name]),
        }
        for name, weight in weights.items()
    ]
    rows = []
    for fmt, rule in schemes:
        quantised = {name: through(weight, fmt, rule) for name, weight in weights.items()}
        approximate = minilm.embed(encoder.with_weights(quantised), sentences)
        rows.append(
            {
                "format": fmt,
                "scale_rule": rule,
                "weight_errors": [
                    _digits(relative_error(quantised[name], weight))
                    for name, weight in weights.items()
                ],
                "output_errors": [
                    _digits(relative_error(inputs[name] @ quantised[name].T, outputs[name]))
                    for name in weights
                ],
                "cosine_distances": [_digits(d) for d in cosine_distances(approximate, exact)],
            }
        )
    return {"layers": layers, "schemes": rows}


def record(data_dir: Path) -> tuple[Path, bool]:
    """Measure the installed model and write `data_dir/accuracy/<id>`; gives the folder, and whether it is new.

    The same model, sentences and code are measured once: an earlier record of them is given back instead.
    MissingModel where the model is not installed.
    """
    folder = minilm.model_folder()
    lines = SENTENCES.read_text(encoding="utf-8").splitlines()
    sentences = minilm.tokenize(folder, lines)
    what = {
        "model": {
            "package": minilm.PACKAGE,
            "version": version(minilm.PACKAGE),
            "weights_sha256": sha256(folder / minilm.WEIGHTS),
            "tokenizer_sha256": sha256(folder / minilm.TOKENIZER),
        },
        "sentences": {
            "count": len(sentences),
            "tokens": sum(map(len, sentences)),
            "sha256": sha256(SENTENCES),
        },
        "code": {name: files.digest(WORKFLOW.parent, paths) for name, paths in CODE.items()},
    }
    for earlier in reversed(list_records(data_dir)):
        known = load(earlier)
        if all(known[name] == part for name, part in what.items()):
            return earlier, False
    value = {
        "schema_version": 1,
        "created_utc": utc_now(),
        **what,
        "software": {
            "python": platform.python_version(),
            **{name: version(name) for name in SOFTWARE},
        },
        **measure(minilm.load(folder), sentences),
    }
    return write(value, data_dir), True


# ---- the record --------------------------------------------------------------------------------------------------


@cache
def schema() -> dict[str, Any]:
    """The closed schema of accuracy.json."""
    return json.loads(SCHEMA.read_text(encoding="utf-8"))


def problems(value: Any) -> list[str]:
    """What is wrong with a record, one sentence each; empty when nothing is."""
    found = [
        f"{e.json_path}: {e.message}" for e in Draft202012Validator(schema()).iter_errors(value)
    ]
    if found:
        return found
    try:
        rfc8785.dumps(value)
    except rfc8785.CanonicalizationError as error:  # NaN and infinity pass every bound of a schema
        return [str(error)]
    layers = len(value["layers"])
    if len({row["layer"] for row in value["layers"]}) != layers:
        found.append("a layer occurs twice")
    if len({(row["format"], row["scale_rule"]) for row in value["schemes"]}) != len(
        value["schemes"]
    ):
        found.append("a format occurs twice with one scale rule")
    for row in value["schemes"]:
        for key, count in (
            ("weight_errors", layers),
            ("output_errors", layers),
            ("cosine_distances", value["sentences"]["count"]),
        ):
            if len(row[key]) != count:
                name = f"{row['format']} {row['scale_rule']}"
                found.append(f"{name} has {len(row[key])} {key}, not {count}")
    return found


def record_id(value: Mapping[str, Any]) -> str:
    """`<model>-<UTC date>-<12 hex>`: the hex is of the SHA-256 over the RFC 8785 bytes of the record."""
    date = value["created_utc"][:10].replace("-", "")
    return f"{MODEL}-{date}-{hashlib.sha256(rfc8785.dumps(value)).hexdigest()[:12]}"


def write(value: Mapping[str, Any], data_dir: Path) -> Path:
    """Write a record once; the folder's name is its id. AccuracyError, and nothing written, when it is not valid."""
    if found := problems(value):
        raise AccuracyError("accuracy record: " + "; ".join(found[:10]))
    folder = Path(data_dir) / FOLDER / record_id(value)
    if not (folder / FILE).exists():  # the name vouches for the content: the same is there already
        files.write_json(folder / FILE, value)
    return folder


def load(folder: Path) -> dict[str, Any]:
    """Read a record whose content matches the schema and its name. AccuracyError with the reasons otherwise."""
    folder = Path(folder)
    try:
        value = files.read_json(folder / FILE)
    except (OSError, ValueError) as error:
        raise AccuracyError(f"{folder.name}/{FILE} cannot be read: {error}") from None
    if found := problems(value):
        raise AccuracyError(f"{folder.name}: " + "; ".join(found[:10]))
    if (right := record_id(value)) != folder.name:
        raise AccuracyError(f"the folder is named {folder.name}, its content gives {right}")
    return value


def list_records(data_dir: Path) -> list[Path]:
    """Folders of the records under `data_dir`, the oldest first."""
    found = sorted(path.parent for path in Path(data_dir, FOLDER).glob(f"*/{FILE}"))
    return sorted(found, key=lambda folder: load(folder)["created_utc"])


def newest(data_dir: Path) -> Path | None:
    """The newest record, or None."""
    return (list_records(data_dir) or [None])[-1]


# ---- reading it --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """An error over the layers: `total` weighs a layer by the energy of what it is relative to."""

    total: float
    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Result:
    """A format under a scale rule: errors over the layers (fractions), cosine over the sentences."""

    format: str
    scale_rule: str
    weight_error: Spread
    output_error: Spread
    cosine_mean: float
    cosine_min: float


def summarise(value: Mapping[str, Any]) -> list[Result]:
    """One result a scheme, in the order of the record."""
    weight, output = (
        [row[key] for row in value["layers"]] for key in ("weight_energy", "output_energy")
    )
    return [
        Result(
            row["format"],
            row["scale_rule"],
            spread(row["weight_errors"], weight),
            spread(row["output_errors"], output),
            1.0 - math.fsum(row["cosine_distances"]) / len(row["cosine_distances"]),
            1.0 - max(row["cosine_distances"]),
        )
        for row in value["schemes"]
    ]


def spread(errors: Sequence[float], energies: Sequence[float]) -> Spread:
    """Aggregates over layers. total = sqrt(sum(error^2 * energy) / sum(energy)): that of all layers as one vector."""
    squared = math.fsum(e * e * w for e, w in zip(errors, energies, strict=True))
    total = math.sqrt(squared / math.fsum(energies))
    return Spread(total, float(np.median(errors)), min(errors), max(errors))


def constants(value: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Named numbers of a record, in the form of a campaign's constants.

    Ratio of the total weight errors, MXFP4 over NVFP4, under each of MXFP4's scale rules; the one without a rule in its
    name is the smaller, thus the one that speaks less for "MXFP4 is less accurate". All weights of the model enter and
    nothing is drawn at random, so there is no interval: for these weights the number is exact.
    """
    results = summarise(value)
    (nvfp4,) = [r for r in results if r.format == "nvfp4"]
    ratios = {
        r.scale_rule: r.weight_error.total / nvfp4.weight_error.total
        for r in results
        if r.format == "mxfp4"
    }
    mild = min(ratios, key=ratios.__getitem__)
    name = "weight_error_mxfp4_over_nvfp4"
    how = "total relative RMS weight error over the linear layers of {model}, MXFP4 ({rule}) over NVFP4"
    model = f"{value['model']['package']} {value['model']['version']}"

    def constant(rule: str, note: str = "") -> dict[str, Any]:
        return {
            "value": ratios[rule],
            "unit": "ratio",
            "ci_low": None,
            "ci_high": None,
            "n": len(value["layers"]),
            "how": how.format(model=model, rule=rule) + note,
        }

    found = {f"{name}_{rule}": constant(rule) for rule in ratios}
    return {
        name: constant(mild, "; of MXFP4's scale rules the one with the smaller error"),
        **found,
    }


def table(results: Iterable[Result]) -> list[str]:
    """The results as lines of text: errors in percent, total (lowest to highest layer)."""
    lines = [
        f"{'format':<10} {'scale rule':<14} {'weight error %':<22} {'output error %':<22} cosine mean, min"
    ]
    for r in results:
        errors = [
            f"{100 * s.total:.3f} ({100 * s.low:.3f}-{100 * s.high:.3f})"
            for s in (r.weight_error, r.output_error)
        ]
        lines.append(
            f"{r.format:<10} {r.scale_rule:<14} {errors[0]:<22} {errors[1]:<22}"
            f" {r.cosine_mean:.5f}, {r.cosine_min:.5f}"
        )
    return lines


def _energy(array: np.ndarray) -> float:
    return _digits(np.square(array, dtype=np.float64).sum())


def _digits(number: float) -> float:
    return float(f"{number:.{DIGITS}g}")
