"""Peers without a device: discovery, the interface, named rows for what is missing, and the gate on made-up peers."""

from __future__ import annotations

import ast
import json
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from lab import peer_arm, peers
from lab.operands import (
    FP8_ACTIVATION_SCALE,
    WeightCopies,
    align,
    bf16_table,
    decode_activations,
    nibble_pair_table,
    scale_code_table,
)
from lab.peers import _interface
from lab.peers._interface import Availability, Candidate, PeerError
from lab.rows import AttemptRow, CheckRow, Tuning, to_json
from qgemm_mx import formats
from qgemm_mx.packing import PackedWeight, dequantize

FOLDER = Path(peers.__file__).parent
OURS = ["peer/humming_bf16", "peer/humming_fp8", "peer/humming_fp8_quantised", "peer/marlin_fp4"]

#: A whole adaptor: a product that is right, wrong, slow or crashing, as its handle says.
MADE_UP = """
import numpy as np
from lab.peers import Availability, Candidate

NAME = "peer/made_up"
requires = {"numpy": "numpy"}
formats = ("mxfp4", "nvfp4")
activations = "bf16"


def available():
    return Availability(True, "numpy 0", None)


def unsupported(format, n, k, m):
    return f"N={n} is odd ({format}, made up)" if n % 2 else None


def prepare(weights, copies):
    return [weights.rows_float64(c, 0, weights.n) * weights.tensor_scale for c in range(copies)]


def bind(handle, x, y, stream, budget):
    x64 = (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)

    def store(values):
        import ml_dtypes
        y[...] = values.astype(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)

    def right(copy):
        store(x64 @ handle[copy].T)

    def wrong(copy):
        store(x64 @ handle[copy][:, ::-1].T)

    def tired(copy):
        store(np.where(np.arange(handle[copy].shape[0]) < 3, x64 @ handle[copy].T, np.nan))

    def crash(copy):
        raise RuntimeError("illegal address")

    offered = dict(right=right, wrong=wrong, tired=tired, crash=crash)
    return [Candidate(name, offered[name]) for name in ORDER][:budget]


def describe(handle):
    return {"version": "numpy 0", "prepared_bytes": handle[0].nbytes, "how": "made up"}
"""


class Stream:
    """A stream that runs at once."""

    ptr = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def synchronize(self):
        return None


@pytest.fixture
def protocol(repository) -> dict:
    return json.loads((repository / "prereg/protocol.json").read_text())


@pytest.fixture
def on_host(monkeypatch):
    """NumPy in CuPy's place: the gate uses no more of it than both have."""
    monkeypatch.setitem(sys.modules, "cupy", np)


def host_weights(fmt: str, n: int = 24, k: int = 256, copies: int = 2) -> WeightCopies:
    rng = np.random.default_rng(5)
    size = formats.weight_bytes(fmt, n, k)
    stride, offset = align(size), n * k // 2
    buffer = nibble_pair_table(fmt)[rng.integers(0, 256, copies * stride)]
    for copy in range(copies):
        scales = scale_code_table(fmt)[rng.integers(0, 256, size - offset)]
        buffer[copy * stride + offset : copy * stride + size] = scales
    tensor_scale = 0.25 if fmt == "nvfp4" else 1.0
    return WeightCopies(fmt, n, k, copies, size, stride, offset, tensor_scale, buffer)


def made_up(tmp_path: Path, order: list[str], **changes: str) -> peers.Peer:
    text = MADE_UP + f"\nORDER = {order}\n" + "".join(f"{k} = {v}\n" for k, v in changes.items())
    (tmp_path / "made_up.py").write_text(text)
    (tmp_path / "_private.py").write_text("raise RuntimeError('not an adaptor')")
    (peer,) = peers.discover(tmp_path)
    return peer


def arm_of(peer, protocol, fmt="mxfp4", m=5, budget=4) -> peer_arm.PeerArm:
    weights = host_weights(fmt)
    rng = np.random.default_rng(9)
    x = bf16_table(1.0)[rng.integers(0, 65536, (m, weights.k))]
    y = np.zeros((m, weights.n), np.uint16)
    handle = peer.prepare(weights, weights.copies)
    return peer_arm.PeerArm(
        peer, handle, weights, x, decode_activations(x), y, Stream(), protocol, budget
    )


def last_is_fastest(_timer, launches, _copies, _nodes, _legs):
    return len(launches) - 1, [float(len(launches) - i) for i in range(len(launches))]


# --- Discovery ------------------------------------------------------------------------------------


def test_every_module_but_the_private_ones_is_an_adaptor() -> None:
    found = peers.discover()
    assert [p.NAME for p in found] == OURS
    assert len(found) == len([p for p in FOLDER.glob("*.py") if not p.stem.startswith("_")])
    for peer in found:
        assert isinstance(peer, peers.Peer)
        assert peer.NAME == f"peer/{peer.__name__.rsplit('.', 1)[1]}"
        assert set(peer.formats) <= set(formats.FORMATS)


def test_discovery_imports_no_package_of_a_peer() -> None:
    """Otherwise reading the list would cost seconds, and fail where a package is missing."""
    for path in FOLDER.glob("*.py"):
        tree = ast.parse(path.read_text())
        top = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
        names = {a.name for n in top if isinstance(n, ast.Import) for a in n.names}
        names |= {n.module for n in top if isinstance(n, ast.ImportFrom)}
        assert not {n.split(".")[0] for n in names} & {"torch", "humming", "vllm", "cupy", "triton"}


def test_a_made_up_peer_comes_in_as_one_file(tmp_path) -> None:
    peer = made_up(tmp_path, ["right"])
    assert peer.NAME == "peer/made_up" and peer.available().installed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"NAME": "'made_up'"}, "NAME 'made_up' is not peer/<name>"),
        ({"activations": "'int8'"}, "activations 'int8' is not one of bf16, fp8"),
        ({"formats": "('fp3',)"}, r"formats \['fp3'\], unknown: \['fp3'\]"),
        ({"formats": "()"}, r"formats \[\]"),
    ],
)
def test_a_broken_adaptor_is_refused_by_name(tmp_path, changes, message) -> None:
    with pytest.raises(PeerError, match=message):
        made_up(tmp_path, [], **changes)


def test_an_adaptor_that_lacks_a_function_is_refused_by_name(tmp_path) -> None:
    (tmp_path / "half.py").write_text(MADE_UP.replace("def bind(", "def other("))
    with pytest.raises(PeerError, match="lacks bind"):
        peers.discover(tmp_path)


def test_two_adaptors_with_one_name_are_refused(tmp_path) -> None:
    made_up(tmp_path, [])
    (tmp_path / "other.py").write_text((tmp_path / "made_up.py").read_text())
    with pytest.raises(
        PeerError, match=r"other.py and another adaptor are both called peer/made_up"
    ):
        peers.discover(tmp_path)


# --- Availability ---------------------------------------------------------------------------------


def test_a_missing_package_is_named() -> None:
    found = _interface.check_packages({"no-such-package-at-all": "json"})
    assert found == Availability(False, None, "package no-such-package-at-all is not installed")


def test_a_package_that_does_not_import_is_named() -> None:
    found = _interface.check_packages({"numpy": "numpy", "pandas": "no_such_module"})
    assert not found.installed and "pandas" in found.version
    assert "does not import (ModuleNotFoundError: No module named 'no_such_module')" in found.reason


def test_an_installed_package_has_its_version() -> None:
    found = _interface.check_packages({"numpy": "numpy"})
    assert found.installed and found.version == f"numpy {np.__version__}"


@pytest.mark.parametrize(
    "impossible", [(True, "1", "broken"), (False, "1", None), (True, None, None)]
)
def test_an_impossible_availability_is_refused(impossible) -> None:
    with pytest.raises(PeerError, match="an installed peer has a version and no reason"):
        Availability(*impossible)


def test_every_peer_that_is_missing_has_its_rows(tmp_path) -> None:
    """On a machine without a device that is all of ours: four names, no silence."""
    found = peers.discover()
    usable, rows = peer_arm.missing_rows(found, now="2026-12-01T00:00:00Z")
    named = {(r.kernel, r.format) for r in rows}
    present = {(p.NAME, f) for p in usable for f in p.formats}
    assert named | present == {(p.NAME, f) for p in found for f in p.formats}
    assert not named & present
    for row in rows:
        assert row.status == "refused" and row.reason.startswith("NOT_INSTALLED: ")
        assert AttemptRow.from_json(to_json(row)) == row


def test_a_missing_peer_in_a_made_up_folder(tmp_path) -> None:
    gone = '__import__("lab.peers").peers.Availability(False, None, "package x is not installed")'
    peer = made_up(tmp_path, [], available=f"lambda: {gone}")
    usable, rows = peer_arm.missing_rows([peer], ["nvfp4"], now="2026-12-01T00:00:00Z")
    assert usable == []
    assert [(r.kernel, r.format, r.reason) for r in rows] == [
        ("peer/made_up", "nvfp4", "NOT_INSTALLED: package x is not installed")
    ]


def test_a_problem_out_of_reach_has_its_row(tmp_path) -> None:
    peer = made_up(tmp_path, [])
    row = peer_arm.unsupported_row(peer, "mxfp4", "odd", 33, 256, 1, now="2026-12-01T00:00:00Z")
    assert row.reason == "NOT_SUPPORTED: N=33 is odd (mxfp4, made up)" and row.N == 33
    assert peer_arm.unsupported_row(peer, "mxfp4", "even", 32, 256, 1) is None


@pytest.mark.parametrize("peer", peers.discover(), ids=lambda p: p.NAME)
def test_our_adaptors_take_the_frozen_shapes(peer, repository) -> None:
    shapes = json.loads((repository / "prereg/shapes.json").read_text())["shapes"]
    refused = {
        s["name"]
        for s in shapes
        for f in peer.formats
        if peer.unsupported(f, s["N"], s["K"], 1)
        and (peer.NAME != "peer/marlin_fp4" or s["K"] % 128 == 0 and s["N"] % 64 == 0)
    }
    assert not refused
    assert "N=2881 is not a multiple" in peer.unsupported("mxfp4", 2881, 4096, 1)


# --- The gate -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
def test_a_right_peer_passes_before_and_after(tmp_path, protocol, on_host, fmt) -> None:
    arm = arm_of(made_up(tmp_path, ["right"]), protocol, fmt)
    arm.tune(None, last_is_fastest)
    before = arm.check(0, "before")
    assert [r.name for r in before] == ["random_fp64_before"] and before[0].passed
    arm.launch(1)
    assert arm.check(1, "after")[0].passed
    assert not arm.check(0, "after")[0].passed, "another copy's result must not pass"
    assert arm.role == "peer" and arm.kernel == "peer/made_up"
    assert arm.weight_bytes == formats.weight_bytes(fmt, 24, 256)


def test_a_wrong_candidate_is_never_timed(tmp_path, protocol, on_host) -> None:
    arm = arm_of(made_up(tmp_path, ["wrong", "right", "tired", "crash"]), protocol)
    timed = []

    def pick(_timer, launches, *_):
        timed.append(len(launches))
        return 0, [1.0]

    arm.tune(None, pick)
    assert timed == [1] and arm.tuning["chosen"] == "right" and arm.tuning["candidates"] == 4
    assert arm.check(0, "before")[0].passed
    assert [r.split(":")[0] for r in arm.refused] == ["wrong", "tired", "crash"]
    assert "illegal address" in arm.refused[-1]
    assert arm.tuning["heuristic_first_over_best"] is None, "the first was not timed"
    Tuning(**arm.tuning)


def test_a_peer_with_nothing_right_is_failed_by_the_gate(tmp_path, protocol, on_host) -> None:
    arm = arm_of(made_up(tmp_path, ["wrong", "tired"]), protocol)
    arm.tune(None, lambda *_: pytest.fail("a wrong candidate was timed"))
    (result,) = arm.check(0, "before")
    assert not result.passed and result.measured > 100
    row = CheckRow(arm.kernel, arm.format, "s", 24, 256, 5, **vars(result))
    assert not row.passed


def test_unwritten_outputs_fail(tmp_path, protocol, on_host) -> None:
    arm = arm_of(made_up(tmp_path, ["right"]), protocol)
    arm.tune(None, last_is_fastest)
    arm._chosen = Candidate("does nothing", lambda copy: None)
    (result,) = arm.check(0, "before")
    assert not result.passed and "120 NaN outputs" in result.detail


def test_the_tuning_is_recorded_with_its_budget(tmp_path, protocol, on_host) -> None:
    arm = arm_of(made_up(tmp_path, ["right", "right"]), protocol, budget=2)
    arm.tune(None, last_is_fastest)
    assert arm.tuning == {"candidates": 2, "chosen": "right", "heuristic_first_over_best": 2.0}
    said = arm.describe()
    assert said["budget"] == 2 and said["version"] == "numpy 0" and said["chosen"] == "right"
    json.dumps(said)


def test_an_arm_is_not_launched_before_it_is_tuned(tmp_path, protocol, on_host) -> None:
    arm = arm_of(made_up(tmp_path, ["right"]), protocol)
    with pytest.raises(PeerError, match="not tuned"):
        arm.launch(0)
    with pytest.raises(PeerError, match="not tuned"):
        arm.check(0, "before")


def test_a_format_that_the_peer_does_not_take_is_refused(tmp_path, protocol, on_host) -> None:
    peer = made_up(tmp_path, ["right"], formats="('nvfp4',)")
    with pytest.raises(PeerError, match="peer/made_up takes nvfp4, not mxfp4"):
        arm_of(peer, protocol)


def test_sums_in_bf16_fail_the_frozen_limit_and_pass_their_own(tmp_path, protocol, on_host) -> None:
    """Stream-K with four slices, as humming's default adds them up; the limit widens only by a number that is named."""
    arm = arm_of(made_up(tmp_path, ["right"]), protocol, m=64)
    x64, handle = arm.x64, arm.handle

    def rounded(values):
        return values.astype(np.float32).astype(ml_dtypes.bfloat16)

    def launch(copy):
        total = None
        for part in np.array_split(np.arange(256), 4):
            one = rounded(x64[:, part] @ handle[copy][:, part].T)
            total = one if total is None else rounded(total.astype(np.float64) + one)
        arm.y[...] = total.view(np.uint16)

    candidate = Candidate("stream-k", launch, bf16_sums=True)
    assert not arm._check(candidate, 0, "before", call=True)[0].passed
    arm.protocol["correctness"]["u_partial_sums"] = 2.0**-5
    assert arm._check(candidate, 0, "before", call=True)[0].passed
    plain = Candidate("the same, not declared", launch)
    assert not arm._check(plain, 0, "before", call=True)[0].passed
    wrong = Candidate("another copy", lambda copy: launch(1 - copy), bf16_sums=True)
    assert not arm._check(wrong, 0, "before", call=True)[0].passed


# --- Activations that the call quantises ----------------------------------------------------------


def quantised(x64: np.ndarray) -> np.ndarray:
    scale = np.abs(x64).max(axis=1, keepdims=True) / 448
    return (x64 / scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(
        np.float64
    ) * scale


def test_a_right_quantiser_passes_and_a_coarser_one_does_not() -> None:
    rng = np.random.default_rng(1)
    x64 = rng.normal(size=(7, 4096)) * np.exp(rng.normal(size=(7, 1)) * 3)
    x64[3] = 0
    seen = np.where(x64 == 0, 0, quantised(np.where(x64 == 0, 1e-9, x64)))
    right = peer_arm.quantiser_check(x64, seen, "q")
    assert right.passed and right.measured > 0.5
    coarse = x64.astype(np.float32).astype(ml_dtypes.float8_e5m2).astype(np.float64)
    assert not peer_arm.quantiser_check(x64, coarse, "q").passed
    assert not peer_arm.quantiser_check(x64, np.roll(seen, 1, axis=0), "q").passed
    seen[0, 0] = np.nan
    assert not peer_arm.quantiser_check(x64, seen, "q").passed


def test_the_truth_is_on_what_the_product_saw(tmp_path, protocol, on_host) -> None:
    arm = arm_of(made_up(tmp_path, ["right"]), protocol)
    seen = quantised(arm.x64)

    def launch(copy):
        y = (seen @ arm.handle[copy].T).astype(np.float32).astype(ml_dtypes.bfloat16)
        arm.y[...] = y.view(np.uint16)

    candidate = Candidate("quantises", launch, "fp8_fast", seen=lambda: seen)
    results = arm._check(candidate, 0, "before", call=True)
    assert [r.name for r in results] == ["random_fp64_before", "quantiser_before"]
    assert all(r.passed for r in results)
    candidate.seen = None
    assert not arm._check(candidate, 0, "before", call=True)[0].passed


def test_fp8_codes_carry_the_scale_that_humming_is_given() -> None:
    from types import SimpleNamespace

    codes = np.array([[0x38, 0xB8, 0x01]], np.uint8)  # 1, -1, the smallest subnormal
    sys.modules.setdefault("cupy", SimpleNamespace(uint16=np.uint16, asarray=np.asarray))
    try:
        found = decode_activations(codes)
    finally:
        if isinstance(sys.modules["cupy"], SimpleNamespace):
            del sys.modules["cupy"]
    assert (found == np.array([[1.0, -1.0, 2.0**-9]]) * float(FP8_ACTIVATION_SCALE)).all()


# --- With the packages, without a device ------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
def test_humming_gets_the_bytes_of_our_weight(fmt) -> None:
    """Its checkpoint layout decodes to the same numbers as ours: eight codes an int32, code of the lowest K lowest."""
    torch = pytest.importorskip("torch")
    from lab.peers import _humming

    weights = host_weights(fmt)
    values, scales = weights.views(1)
    packed = PackedWeight(
        fmt, weights.n, weights.k, values, scales, np.array([weights.tensor_scale], np.float32)
    )
    tensors = _humming.checkpoint_tensors(weights, 1)
    assert tensors["weight"].data_ptr() == values.ctypes.data, "no copy"
    assert tensors["weight_scale"].data_ptr() == scales.ctypes.data, "no copy"
    words = tensors["weight"].view(torch.int32).numpy().astype(np.int64) & 0xFFFFFFFF
    codes = (words[..., None] >> (4 * np.arange(8))) & 15
    elements = formats.E2M1_VALUES[codes.reshape(weights.n, weights.k)]
    kind = torch.float8_e8m0fnu if fmt == "mxfp4" else torch.float8_e4m3fn
    group = tensors["weight_scale"].view(kind).float().numpy()
    decoded = elements * np.repeat(group, weights.k // group.shape[1], axis=1)
    if fmt == "nvfp4":
        decoded = decoded * tensors["weight_scale_2"].numpy()
    assert (decoded == dequantize(packed)).all()


# --- Layers ---------------------------------------------------------------------------------------


def test_peers_import_nothing_that_judges() -> None:
    judging = {"claims", "registry", "verdicts", "cost_model", "predictions", "scores", "judgement"}
    for path in (*FOLDER.glob("*.py"), FOLDER.parent / "peer_arm.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lab"):
                parts = {*node.module.split("."), *(a.name for a in node.names)}
                assert not parts & judging, f"{path.name} imports {parts & judging}"
            if isinstance(node, ast.Import):
                assert not {p for a in node.names for p in a.name.split(".")} & judging


def test_humming_compiles_the_kernels_of_many_rows_and_handles_in_one_pass(monkeypatch) -> None:
    """What `bind` asks for one by one later, without repeats and without the SMs, which are no part of a kernel."""
    from lab.peers import _humming, discover

    passes = []

    class Kernel:
        @staticmethod
        def _resolve_configs(layer, compute, tuning, device):
            assert compute == "{}"
            return {"layer": layer, "sm_version": 90}, {}, json.loads(tuning)

        @staticmethod
        def compile_many(specs, device):
            passes.append((specs, device))

    torch = types.ModuleType("torch")
    torch.cuda = SimpleNamespace(current_device=lambda: 0)
    kernel = types.ModuleType("humming.kernel.humming")
    kernel.HummingKernel = Kernel
    for name, module in {
        "torch": torch,
        "humming": types.ModuleType("humming"),
        "humming.kernel": types.ModuleType("humming.kernel"),
        "humming.kernel.humming": kernel,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(
        _humming,
        "configurations",
        lambda handle, m, budget: [
            ({"gemm_type": "dense"}, {"block": 16 * -(-m // 16), "num_sms": m})
        ],
    )

    def handle(name: str) -> Any:
        tensors = [{"weight": SimpleNamespace(device="cuda:0")}]
        return SimpleNamespace(config=SimpleNamespace(to_str=lambda: name), tensors=tensors)

    _humming.warm([(handle("a"), [1, 2, 16, 32]), (handle("b"), [1])], 2)
    ((specs, device),) = passes
    assert device == 0
    assert [(c["layer"], c["block"], c["gemm_type"]) for _, c in specs] == [
        ("a", 16, "dense"), ("a", 32, "dense"), ("b", 16, "dense"),
    ]  # fmt: skip
    assert all("num_sms" not in c for _, c in specs)
    _humming.warm([], 2)
    assert len(passes) == 1
    hooks = {getattr(p, "warm", None) for p in discover() if "humming" in p.NAME}
    assert hooks == {_humming.warm}  # one hook, so one pass for all of them
