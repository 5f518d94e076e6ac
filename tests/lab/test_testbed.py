"""The testbed without a device: names, the order of bits, plans, and what the compiler made of each variant."""

from __future__ import annotations

import json
import re
from itertools import product

import numpy as np
import pytest

from lab import sass_counts, testbed
from lab.decomposition import FACTORS, FULL, NONE, present_factors, variants
from lab.testbed import Config
from qgemm_mx import build

CODES = np.array(list(product(range(16), repeat=2)), np.uint32)  # every pair of codes


def placed_shift_mask(word: int, pair: int) -> tuple[int, int]:
    """`place` of testbed.cuh: sign and magnitude bits of the two halves."""
    top = (word << (12 - 4 * pair)) & 0xFFFFFFFF
    bits = (top & 0x80008000) | ((top & 0x70007000) >> 6)
    return bits & 0xFFFF, bits >> 16


def placed_host_bits(word: int, pair: int) -> tuple[int, int]:
    mask = 0x81C081C0
    if pair < 2:
        bits = (word << (3 * pair)) & mask
    else:
        magnitude = (word << 6 if pair == 2 else word >> 3) & 0x01C001C0
        bits = ((word << (1 if pair == 2 else 2)) & 0x80008000) | magnitude
    return bits & 0xFFFF, (bits >> 16) & 0xFFFF


@pytest.mark.parametrize(
    ("sequence", "placed"), [("shift_mask", placed_shift_mask), ("host_bits", placed_host_bits)]
)
@pytest.mark.parametrize("pair", range(4))
def test_every_pair_of_codes_comes_out_as_the_kernel_extracts_it(sequence, placed, pair) -> None:
    rng = np.random.default_rng(pair)
    for low, high in CODES:
        codes = rng.integers(0, 16, 8, dtype=np.uint32)  # neighbours of any value must not matter
        codes[2 * pair], codes[2 * pair + 1] = low, high
        row_major = np.uint32(sum(int(c) << (4 * i) for i, c in enumerate(codes)))
        word = int(testbed.reorder_words(np.array([row_major], np.uint32), sequence)[0])
        # Sign at bit 15, magnitude at bits 8..6: the element times 2^-126 as BF16.
        want = tuple(int(c >> 3) << 15 | int(c & 7) << 6 for c in (low, high))
        assert placed(word, pair) == want


def test_reordering_keeps_every_code() -> None:
    words = np.random.default_rng(0).integers(0, 2**32, 1000, dtype=np.uint32)

    def sorted_nibbles(array):
        return np.sort(
            np.stack([(array >> np.uint32(4 * i)) & np.uint32(15) for i in range(8)]), axis=0
        )

    assert (sorted_nibbles(testbed.reorder_words(words)) == sorted_nibbles(words)).all()


def test_sources_and_sidecars_hold_exactly_the_planned_entries(repository) -> None:
    planned: dict[str, set[str]] = {}
    for config in testbed.all_configs():
        planned.setdefault(config.source, set()).add(config.entry)
    sources = {n: s for n, s in build.load_sources().items() if n.startswith("testbed")}
    assert set(sources) == set(planned)
    for name, source in sources.items():
        assert set(source.threads) == planned[name]
        assert source.role == "testbed"
    threads = {c.entry: c.threads for c in testbed.all_configs()}
    assert {e: t for s in sources.values() for e, t in s.threads.items()} == threads


def test_sidecars_are_those_that_the_plan_writes(tmp_path) -> None:
    testbed.write_sidecars(tmp_path)
    for path in tmp_path.glob("*.json"):
        assert json.loads(path.read_text()) == json.loads((build.CUDA_DIR / path.name).read_text())


def test_factors_have_the_bits_of_the_kernels_enum() -> None:
    text = (build.CUDA_DIR / "testbed.cuh").read_text()
    names = dict(re.findall(r"\bk(\w+) = (\d+),", text.split("enum Factor", 1)[1].split("}", 1)[0]))
    for bit, factor in enumerate(FACTORS):
        name = "".join(part.capitalize() for part in factor.split("_"))
        assert int(names[name]) == 1 << bit


def test_the_factorial_has_one_entry_a_variant() -> None:
    for m in (1, 16, 64):
        configs = testbed.factorial_configs(m)
        assert list(configs) == variants() and len({c.entry for c in configs.values()}) == 32
        assert {c.source for c in configs.values()} == {f"testbed_t{testbed.tokens_for(m)}"}
        right = {name for name, c in configs.items() if c.claims_right}
        assert right == {FULL, "testbed/-layout_staging"}


@pytest.mark.parametrize("config", testbed.all_configs(), ids=lambda c: c.entry)
def test_a_launch_fits_a_multiprocessor(config) -> None:
    room = testbed.SMEM_BYTES_PER_SM
    assert config.ring_bytes <= config.smem_bytes <= 227 * 1024
    assert config.resident * (config.smem_bytes + testbed.SMEM_RESERVED_BYTES) <= room
    one_more = config.resident + 1
    assert (
        one_more * (config.smem_bytes + testbed.SMEM_RESERVED_BYTES) > room or config.tokens == 64
    )
    assert config.resident * config.threads <= 2048


@pytest.mark.parametrize(
    ("n", "k", "m", "split"),
    [
        (4096, 4096, 1, 4),
        (1024, 4096, 1, 8),
        (14336, 4096, 1, 1),
        (57344, 8192, 1, 1),
        (64, 256, 1, 1),
    ],
)
def test_the_planned_split_fills_the_device_once(n, k, m, split) -> None:
    config = Config(tokens=testbed.tokens_for(m))
    assert config.split(n, k, m, 132) == split
    slabs = -(-k // config.slab)
    assert split == 1 or slabs // split >= 2


@pytest.fixture(scope="module")
def counts(repository):
    """SASS counts of the factorial for 8 tokens, built into the workflow's cache: half a minute the first time."""
    source = build.load_sources()["testbed_t8"]
    out = repository / ".work" / "cache" / "cubins"
    record = build.compile_cubin(source, "sm_90a", out)
    assert all(e.spill_store_bytes == e.spill_load_bytes == 0 for e in record.entries)
    found = sass_counts.count_cubin(out / "sm_90a" / record.cubin)
    return {name: found[c.entry] for name, c in testbed.factorial_configs(1).items()}


def test_the_compiler_removed_what_was_meant(counts) -> None:
    """What a factor stands for is there when it is present and gone when it is not, in all 32 variants."""
    for name, entry in counts.items():
        present = present_factors(name)
        ops = entry.opcodes
        assert (ops["HMMA"] > 0) == ("matrix_issue" in present), name
        assert (ops["HMUL2"] + ops["HFMA2"] > 0) == ("dequant_issue" in present), name
        assert (ops["VOTE"] > 0) == ("dequant_issue" in present), name  # of the wide path
        assert (ops["ATOMG"] > 0) == ("epilogue_reduction" in present), name
        assert (ops["LDGSTS"] > 0) == bool({"layout_staging", "matrix_issue"} & present), name
        assert ops["LDL"] == ops["STL"] == 0, name


def test_weight_loads_are_never_deleted(counts) -> None:
    """Without staging a slab needs two 16-byte loads a lane, with it two 16-byte copies a thread: in every variant."""
    for name, entry in counts.items():
        present = present_factors(name)
        loads = entry.opcodes["LDGSTS"] if "layout_staging" in present else entry.opcodes["LDG"]
        assert loads >= 2, name


def test_a_removed_factor_takes_no_other_with_it(counts) -> None:
    """The loop of a variant without dequantisation still multiplies as often, and the other way round."""
    full = counts[FULL].loop.opcodes
    bare = counts["testbed/-dequant_issue"].loop.opcodes
    paths = full["HMMA"] // bare["HMMA"]  # full has the narrow and the wide path in one loop
    assert full["HMMA"] == paths * bare["HMMA"] and paths in (1, 2)
    assert counts["testbed/-matrix_issue"].loop.opcodes["LOP3"] > 50
    assert counts[NONE].loop.opcodes["HMMA"] == 0
