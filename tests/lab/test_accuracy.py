"""Errors of the formats: measures that are right, a record that cannot be edited, and figure 5."""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from test_minilm import random_encoder, write_model

from lab import accuracy, files, minilm, schema
from lab.accuracy import AccuracyError, Result, Spread
from lab.accuracy_figure import STAND_IN, fig_accuracy
from qgemm_mx import formats

DATA = Path(__file__).resolve().parents[2] / "data"
SENTENCES = [[1, 5, 2], [1, 2], [1, 7, 10, 3, 0, 2]]
SCHEMES = pytest.mark.parametrize(("fmt", "rule"), accuracy.SCHEMES, ids="-".join)


@pytest.fixture
def weight() -> np.ndarray:
    """float32 [64, 256] whose rows differ in size, as in a trained model."""
    rng = np.random.default_rng(1)
    return (rng.normal(0, 0.05, (64, 256)) * rng.lognormal(0, 0.5, (64, 1))).astype(np.float32)


def representable(fmt: str, n: int, k: int, seed: int = 0) -> np.ndarray:
    """Weights that the format holds exactly under every scale rule: each group has its largest element."""
    spec = formats.FORMATS[fmt]
    rng = np.random.default_rng(seed)
    values = spec.element_values[spec.element_values > -8]
    groups = rng.choice(values, (n, k // spec.group, spec.group))
    groups[..., 0] = values.max()
    if fmt == "nvfp4":  # tensor scale 1 and group scale 448, or half of that
        scale = rng.choice([224.0, 448.0], groups.shape[:2])
        scale[0, 0] = 448.0
    else:
        scale = np.exp2(rng.integers(-9, 3, groups.shape[:2]))
    return (groups * scale[..., None]).reshape(n, k).astype(np.float32)


# ---- the measures ------------------------------------------------------------------------------------------------


def test_relative_error_by_hand() -> None:
    exact = np.array([[3.0, 4.0], [0.0, 0.0]])
    assert accuracy.relative_error(exact, exact) == 0
    assert accuracy.relative_error(np.zeros((2, 2)), exact) == 1
    assert accuracy.relative_error(exact + [[0, 0], [0, 2.5]], exact) == 0.5
    with pytest.raises(ValueError, match=r"\[2, 2\] is all zero"):
        accuracy.relative_error(exact, np.zeros((2, 2)))


def test_more_bits_less_error(weight: np.ndarray) -> None:
    """A uniform grid of b bits on each group of 64: the error falls by 2 a bit."""

    def uniform(bits: int) -> np.ndarray:
        groups = weight.astype(np.float64).reshape(64, -1, 64)
        step = abs(groups).max(axis=2, keepdims=True) / (2 ** (bits - 1) - 1)
        return (np.rint(groups / step) * step).reshape(weight.shape)

    errors = [accuracy.relative_error(uniform(b), weight) for b in range(3, 10)]
    steps = np.array(errors[:-1]) / errors[1:]
    assert (steps > 1.9).all() and (steps[2:] < 2.2).all()
    ours = accuracy.relative_error(accuracy.through(weight, "int4_g64", "amax_over_7"), weight)
    assert ours == pytest.approx(
        errors[1], rel=0.01
    )  # the same grid, less the rounding of its scale to BF16


def test_finer_scales_less_error(weight: np.ndarray) -> None:
    error = {
        scheme: accuracy.relative_error(accuracy.through(weight, *scheme), weight)
        for scheme in accuracy.SCHEMES
    }
    assert error["int4_g64", "amax_over_7"] < error["int4_g128", "amax_over_7"]
    assert error["nvfp4", "modelopt"] < min(
        error["mxfp4", rule] for rule in ("ocp_floor", "modelopt_ceil")
    )
    assert all(0.05 < e < 0.25 for e in error.values())


@SCHEMES
def test_scale_invariance(weight: np.ndarray, fmt: str, rule: str) -> None:
    """A power of two moves every scale and no element."""
    once = accuracy.relative_error(accuracy.through(weight, fmt, rule), weight)
    for power in (2.0**-7, 2.0**5):
        scaled = weight * np.float32(power)
        assert accuracy.relative_error(accuracy.through(scaled, fmt, rule), scaled) == once


@SCHEMES
def test_representable_weights_have_no_error(fmt: str, rule: str) -> None:
    weight = representable(fmt, 16, 256)
    np.testing.assert_array_equal(accuracy.through(weight, fmt, rule), weight)
    off = weight.copy()
    off[3, 7] += 0.3 * abs(weight[3]).max()
    assert accuracy.relative_error(accuracy.through(off, fmt, rule), off) > 0


def test_mxfp4_error_by_another_library(weight: np.ndarray) -> None:
    """ml_dtypes rounds the elements; the scale is written out from the definition."""
    import ml_dtypes

    groups = weight.astype(np.float64).reshape(64, -1, 32)
    amax = abs(groups).max(axis=2, keepdims=True)
    for rule, exponent in (
        ("ocp_floor", np.floor(np.log2(amax)) - 2),
        ("modelopt_ceil", np.ceil(np.log2(amax / 6))),
    ):
        scale = np.exp2(exponent)
        elements = np.clip(groups / scale, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float64)
        right = accuracy.relative_error((elements * scale).reshape(weight.shape), weight)
        found = accuracy.relative_error(accuracy.through(weight, "mxfp4", rule), weight)
        assert found == pytest.approx(right, rel=1e-12)


def test_cosine_distance_is_one_minus_the_cosine() -> None:
    angle = np.array([0.0, 1e-9, 0.3, math.pi / 2, math.pi])
    a = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    b = np.tile([1.0, 0.0], (len(angle), 1))
    found = accuracy.cosine_distances(a, b)
    np.testing.assert_allclose(found, 1 - np.cos(angle), atol=1e-15)
    assert found[1] == pytest.approx(5e-19)  # where 1 - cos(x) itself is rounded to zero


# ---- the whole measurement, on a tiny model ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def encoder() -> minilm.Encoder:
    return random_encoder(blocks=1, heads=2, hidden=128, inner=256)


def test_every_layer_and_sentence_is_measured(encoder: minilm.Encoder) -> None:
    found = accuracy.measure(encoder, SENTENCES)
    assert [row["layer"] for row in found["layers"]] == list(encoder.linear_layers)
    assert [(row["format"], row["scale_rule"]) for row in found["schemes"]] == list(
        accuracy.SCHEMES
    )
    inputs: dict[str, np.ndarray] = {}
    minilm.embed(encoder, SENTENCES, inputs.__setitem__)
    for row in found["schemes"]:
        assert len(row["cosine_distances"]) == len(SENTENCES)
        for i, (layer, x) in enumerate(inputs.items()):
            w = encoder.weight(layer).astype(np.float64)
            e = accuracy.through(encoder.weight(layer), row["format"], row["scale_rule"]) - w
            for key, error, exact in (("weight", e, w), ("output", x @ e.T, x @ w.T)):
                ratio = math.sqrt((error**2).sum() / (exact**2).sum())
                assert row[f"{key}_errors"][i] == pytest.approx(ratio, rel=1e-5), (layer, key)
                energy = found["layers"][i][f"{key}_energy"]
                assert energy == pytest.approx((exact**2).sum(), rel=1e-5)
    np.testing.assert_array_equal(found["layers"][4]["n"], 256)


def test_a_representable_model_has_no_error_of_any_kind(encoder: minilm.Encoder) -> None:
    exact = encoder.with_weights(
        {
            layer: representable("mxfp4", *encoder.weight(layer).shape, seed=i)
            for i, layer in enumerate(encoder.linear_layers)
        }
    )
    rules = formats.FORMATS["mxfp4"].scale_rules
    found = accuracy.measure(exact, SENTENCES, [("mxfp4", rule) for rule in rules])
    for row in found["schemes"]:
        assert not any(row["weight_errors"] + row["output_errors"] + row["cosine_distances"])


def test_activations_decide_the_output_error_and_not_the_weight_error(
    encoder: minilm.Encoder,
) -> None:
    scheme = [("nvfp4", "modelopt")]
    (here,), (there,) = (
        accuracy.measure(encoder, tokens, scheme)["schemes"] for tokens in (SENTENCES, [[3, 4]])
    )
    assert here["weight_errors"] == there["weight_errors"]
    assert here["output_errors"] != there["output_errors"]


# ---- aggregates --------------------------------------------------------------------------------------------------


def test_the_total_is_the_error_of_all_layers_as_one(weight: np.ndarray) -> None:
    parts = [weight[:8], 10 * weight[8:40], weight[40:]]
    approximate = [accuracy.through(p, "int4_g64", "amax_over_7") for p in parts]
    errors = [accuracy.relative_error(a, p) for a, p in zip(approximate, parts, strict=True)]
    found = accuracy.spread(errors, [float((p.astype(np.float64) ** 2).sum()) for p in parts])
    whole = accuracy.relative_error(np.concatenate(approximate), np.concatenate(parts))
    assert found.total == pytest.approx(whole, rel=1e-12)
    assert (found.low, found.median, found.high) == (min(errors), sorted(errors)[1], max(errors))
    assert accuracy.spread([0.3, 0.4], [1.0, 1.0]).total == pytest.approx(math.sqrt(0.125))
    assert accuracy.spread([0.3, 0.4], [1.0, 0.0]).total == pytest.approx(0.3)


def made_up(**errors: float) -> dict:
    """A record of two layers and two sentences; `errors` is scheme -> weight error of every layer."""
    sha = "0" * 64
    known = {f"{fmt}_{rule}": (fmt, rule) for fmt, rule in accuracy.SCHEMES}
    return {
        "schema_version": 1,
        "created_utc": "2026-01-02T03:04:05Z",
        "model": {"package": "p", "version": "1", "weights_sha256": sha, "tokenizer_sha256": sha},
        "sentences": {"count": 2, "tokens": 9, "sha256": sha},
        "code": {"formats": sha, "experiment": sha},
        "software": {"python": "3", **{name: "1" for name in accuracy.SOFTWARE}},
        "layers": [
            {"layer": name, "n": 2, "k": 128, "weight_energy": 1.0, "output_energy": 2.0}
            for name in ("a", "b")
        ],
        "schemes": [
            {
                "format": known[name][0],
                "scale_rule": known[name][1],
                "weight_errors": [error, error],
                "output_errors": [error, 2 * error],
                "cosine_distances": [error**2, 3 * error**2],
            }
            for name, error in errors.items()
        ],
    }


ERRORS = {"mxfp4_ocp_floor": 0.12, "mxfp4_modelopt_ceil": 0.11, "nvfp4_modelopt": 0.1}


def test_summary_of_a_record() -> None:
    result = accuracy.summarise(made_up(**ERRORS))[2]
    assert (result.format, result.scale_rule) == ("nvfp4", "modelopt")
    assert result.weight_error == Spread(*[pytest.approx(0.1)] * 4)
    assert result.output_error.total == pytest.approx(math.sqrt(0.025))
    assert result.cosine_mean == pytest.approx(0.98)
    assert result.cosine_min == pytest.approx(0.97)


@pytest.mark.parametrize(("ocp", "mild"), [(0.12, "modelopt_ceil"), (0.09, "ocp_floor")])
def test_the_ratio_takes_the_milder_rule_and_says_so(ocp: float, mild: str) -> None:
    found = accuracy.constants(made_up(**ERRORS | {"mxfp4_ocp_floor": ocp}))
    schema.check_constants(found)  # a campaign would take them
    name = "weight_error_mxfp4_over_nvfp4"
    assert found[f"{name}_ocp_floor"]["value"] == pytest.approx(ocp / 0.1)
    assert found[f"{name}_modelopt_ceil"]["value"] == pytest.approx(1.1)
    assert found[name]["value"] == found[f"{name}_{mild}"]["value"]
    assert mild in found[name]["how"] and "smaller error" in found[name]["how"]


# ---- the record --------------------------------------------------------------------------------------------------


def test_a_record_is_written_once_and_read_back(tmp_path: Path) -> None:
    value = made_up(**ERRORS)
    folder = accuracy.write(value, tmp_path)
    assert re.fullmatch(r"all-minilm-l6-v2-20260102-[0-9a-f]{12}", folder.name)
    before = (folder / accuracy.FILE).stat().st_mtime_ns
    assert accuracy.write(copy.deepcopy(value), tmp_path) == folder
    assert (folder / accuracy.FILE).stat().st_mtime_ns == before
    assert accuracy.load(folder) == value
    later = accuracy.write(value | {"created_utc": "2026-01-02T03:04:06Z"}, tmp_path)
    assert accuracy.list_records(tmp_path) == [folder, later]
    assert accuracy.newest(tmp_path) == later
    assert accuracy.newest(tmp_path / "nothing") is None


def edited(value: dict, edit: str) -> dict:
    value = copy.deepcopy(value)
    row = value["schemes"][0]
    if edit == "number":
        row["weight_errors"][0] = 0.01
    elif edit == "nan":
        row["weight_errors"][0] = math.nan
    elif edit == "short":
        row["cosine_distances"].pop()
    elif edit == "twice":
        value["schemes"].append(row)
    elif edit == "layer":
        value["layers"][1]["layer"] = "a"
    elif edit == "negative":
        row["output_errors"][0] = -0.1
    elif edit == "key":
        row["note"] = "good"
    return value


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        ("number", "its content gives"),
        ("nan", "nan"),
        ("short", "mxfp4 ocp_floor has 1 cosine_distances, not 2"),
        ("twice", "occurs twice"),
        ("layer", "a layer occurs twice"),
        ("negative", "less than the minimum"),
        ("key", "'note' was unexpected"),
    ],
)
def test_an_edited_record_is_refused(tmp_path: Path, edit: str, says: str) -> None:
    folder = accuracy.write(made_up(**ERRORS), tmp_path)
    value = edited(made_up(**ERRORS), edit)
    (folder / accuracy.FILE).write_text(json.dumps(value))
    with pytest.raises(AccuracyError, match=f"(?i){says}"):
        accuracy.load(folder)
    if edit != "number":
        with pytest.raises(AccuracyError, match=f"(?i){says}"):
            accuracy.write(value, tmp_path / "new")
        assert not (tmp_path / "new").exists()


def test_half_a_file_is_refused(tmp_path: Path) -> None:
    folder = accuracy.write(made_up(**ERRORS), tmp_path)
    text = (folder / accuracy.FILE).read_text()
    (folder / accuracy.FILE).write_text(text[: len(text) // 2])
    with pytest.raises(AccuracyError, match="cannot be read"):
        accuracy.load(folder)


def test_the_same_model_and_code_is_measured_once(tmp_path: Path, monkeypatch, encoder) -> None:
    folder = write_model(tmp_path / "model", encoder)
    (folder / minilm.TOKENIZER).write_text("{}")
    monkeypatch.setattr(minilm, "model_folder", lambda: folder)
    monkeypatch.setattr(
        minilm, "tokenize", lambda _, lines: [[1, len(line) % 11] for line in lines]
    )
    monkeypatch.setattr(accuracy, "version", lambda name: "0")
    first, new = accuracy.record(tmp_path / "data")
    assert new and accuracy.record(tmp_path / "data") == (first, False)
    assert accuracy.load(first)["sentences"]["count"] == 64
    layer = encoder.linear_layers[0]
    write_model(folder, encoder.with_weights({layer: 2 * encoder.weight(layer)}))
    second, new = accuracy.record(tmp_path / "data")
    assert new and second != first


def test_schema_is_closed_and_every_key_is_described() -> None:
    def closed(part: object) -> None:
        if isinstance(part, dict):
            if part.get("type") == "object":
                assert part["additionalProperties"] is False
                assert set(part["required"]) == set(part["properties"])
            for name, child in part.get("properties", {}).items():
                assert child["description"] and child["unit"], name
            for child in part.values():
                closed(child)
        elif isinstance(part, list):
            for child in part:
                closed(child)

    closed(accuracy.schema())
    schemes = accuracy.schema()["properties"]["schemes"]["items"]["properties"]
    assert schemes["format"]["enum"] == list(formats.FORMATS)
    rules = {rule for fmt in formats.FORMATS.values() for rule in fmt.scale_rules}
    assert set(schemes["scale_rule"]["enum"]) == rules


def test_the_data_dictionary_names_every_key() -> None:
    text = (DATA / "accuracy" / "README.md").read_text()
    named = [*accuracy.schema()["properties"]]
    named += accuracy.schema()["properties"]["schemes"]["items"]["properties"]
    unsaid = {"schema_version", "format", "scale_rule"}
    assert [name for name in named if name not in unsaid and f"`{name}`" not in text] == []


# ---- what is committed -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def committed() -> dict:
    return accuracy.load(accuracy.newest(DATA))


def test_the_committed_record_holds_every_format_of_these_sentences(committed: dict) -> None:
    assert {(r.format, r.scale_rule) for r in accuracy.summarise(committed)} == set(
        accuracy.SCHEMES
    )
    assert committed["sentences"]["sha256"] == files.sha256(accuracy.SENTENCES)
    assert len(committed["layers"]) == 36


def test_sentences_are_plain_and_distinct() -> None:
    lines = accuracy.SENTENCES.read_text().splitlines()
    assert len(lines) == len(set(lines)) == 64
    assert all(re.fullmatch(r"[A-Z][A-Za-z ,]+\.", line) for line in lines)


def test_measuring_again_gives_the_committed_numbers(committed: dict) -> None:
    try:
        folder = minilm.model_folder()
    except minilm.MissingModel as error:
        pytest.skip(str(error))
    assert files.sha256(folder / minilm.WEIGHTS) == committed["model"]["weights_sha256"]
    sentences = minilm.tokenize(folder, accuracy.SENTENCES.read_text().splitlines())
    again = accuracy.measure(minilm.load(folder), sentences, [("nvfp4", "modelopt")])
    assert again["layers"] == committed["layers"]
    assert again["schemes"] == [r for r in committed["schemes"] if r["format"] == "nvfp4"]


# ---- figure 5 ----------------------------------------------------------------------------------------------------

SPEEDS = {"mxfp4": 1.5, "nvfp4": 1.4, "int4_g128": 1.6, "int4_g64": 1.55}


@pytest.fixture(scope="module")
def results() -> list[Result]:
    return [
        Result(
            fmt, rule, Spread(e, e, e / 2, 2 * e), Spread(e, e, e / 3, 3 * e), 1 - e / 4, 1 - e / 2
        )
        for e, (fmt, rule) in zip((0.11, 0.12, 0.09, 0.13, 0.1), accuracy.SCHEMES, strict=True)
    ]


def texts(svg: str) -> list[str]:
    namespace = "{http://www.w3.org/2000/svg}"
    return ["".join(t.itertext()) for t in ElementTree.fromstring(svg).iter(f"{namespace}text")]


def test_missing_speeds_are_said_wherever_they_are_missing(results: list[Result]) -> None:
    none = texts(fig_accuracy(results, {}))
    some = texts(fig_accuracy(results, SPEEDS | {"int4_g64": None}))
    every = texts(fig_accuracy(results, SPEEDS))
    label = "FP8 bytes over bytes (speed not measured yet)"
    assert none.count(label) == 3 and label not in some + every
    assert some.count("speed-up over FP8 (ratio)") == every.count("speed-up over FP8 (ratio)") == 3
    assert [any(STAND_IN in t for t in found) for found in (none, some, every)] == [
        True,
        True,
        False,
    ]


def test_figure_5_names_errors_formats_and_rules(results: list[Result]) -> None:
    found = texts(fig_accuracy(results, SPEEDS))
    for text in (
        "weight error (%)", "layer-output error (%)", "1 - embedding cosine (%)",
        "MXFP4, ocp_floor", "MXFP4, modelopt_ceil", "NVFP4", "INT4-g128", "INT4-g64",
    ):  # fmt: skip
        assert text in found


@pytest.mark.parametrize("columns", [1, 3])
def test_figure_5_is_reproducible_and_stands_on_its_own(
    results: list[Result], columns: int
) -> None:
    svg = fig_accuracy(results, SPEEDS, columns=columns)
    assert svg == fig_accuracy(results, dict(reversed(SPEEDS.items())), columns=columns)
    ids = re.findall(r'\bid="([^"]+)"', svg)
    assert len(ids) == len(set(ids))
    assert not re.search("<(style|script|image)", svg) and len(svg.encode()) < 100_000
    faster = fig_accuracy(results, SPEEDS | {"mxfp4": 1.7}, columns=columns)
    assert faster != svg
    width = float(re.search(r'viewBox="0 0 ([0-9.]+)', svg).group(1))
    assert (width < 300) == (columns == 1)


def test_figure_5_refuses_what_cannot_be_drawn(results: list[Result]) -> None:
    with pytest.raises(ValueError, match="no accuracy results"):
        fig_accuracy([], SPEEDS)
    for speed in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="the speed-up of nvfp4"):
            fig_accuracy(results, SPEEDS | {"nvfp4": speed})
