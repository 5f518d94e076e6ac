"""The encoder in numpy: against a slow implementation on a tiny model, and against the reference on the real one."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from lab import minilm
from lab.minilm import Encoder

REFERENCE = Path(__file__).with_name("minilm_reference.json")
HIDDEN, INNER, VOCABULARY, POSITIONS = 8, 12, 11, 6
SENTENCES = [[1, 5, 2], [1, 2], [1, 7, 10, 3, 0, 2]]


def random_encoder(
    blocks: int = 2, heads: int = 2, hidden: int = HIDDEN, inner: int = INNER, seed: int = 0
) -> Encoder:
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return rng.normal(0, 0.5, shape).astype(np.float32)

    tensors = {
        "embeddings.word_embeddings.weight": draw(VOCABULARY, hidden),
        "embeddings.position_embeddings.weight": draw(POSITIONS, hidden),
        "embeddings.token_type_embeddings.weight": draw(2, hidden),
        "embeddings.LayerNorm.weight": draw(hidden),
        "embeddings.LayerNorm.bias": draw(hidden),
    }
    for i in range(blocks):
        for name in minilm.LINEAR:
            n = inner if name == "intermediate.dense" else hidden
            k = inner if name == "output.dense" else hidden
            tensors[f"encoder.layer.{i}.{name}.weight"] = draw(n, k)
            tensors[f"encoder.layer.{i}.{name}.bias"] = draw(n)
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            tensors[f"encoder.layer.{i}.{name}.weight"] = draw(hidden)
            tensors[f"encoder.layer.{i}.{name}.bias"] = draw(hidden)
    return Encoder(tensors, blocks, heads, 1e-3)


def slow_embedding(encoder: Encoder, tokens: list[int]) -> list[float]:
    """One sentence, one number at a time, as the paper writes it."""
    get = {name: array.tolist() for name, array in encoder.tensors.items()}

    def linear(layer, x):
        rows, bias = get[f"{layer}.weight"], get[f"{layer}.bias"]
        return [
            b + sum(w * v for w, v in zip(r, x, strict=True))
            for r, b in zip(rows, bias, strict=True)
        ]

    def norm(layer, x):
        mean = sum(x) / len(x)
        deviation = math.sqrt(sum((v - mean) ** 2 for v in x) / len(x) + encoder.layer_norm_eps)
        gain, bias = get[f"{layer}.weight"], get[f"{layer}.bias"]
        return [(v - mean) / deviation * g + b for v, g, b in zip(x, gain, bias, strict=True)]

    def add(*vectors):
        return [sum(values) for values in zip(*vectors, strict=True)]

    words, places, kinds = (
        get[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position", "token_type")
    )
    xs = [
        norm("embeddings.LayerNorm", add(words[token], places[i], kinds[0]))
        for i, token in enumerate(tokens)
    ]
    for block in (f"encoder.layer.{i}" for i in range(encoder.blocks)):
        q, k, v = (
            [linear(f"{block}.attention.self.{name}", x) for x in xs]
            for name in ("query", "key", "value")
        )
        size = len(xs[0]) // encoder.heads
        mixed = []
        for i in range(len(xs)):
            row = []
            for h in range(encoder.heads):
                part = range(h * size, (h + 1) * size)
                scores = [
                    sum(q[i][d] * k[j][d] for d in part) / math.sqrt(size) for j in range(len(xs))
                ]
                weights = [math.exp(s) for s in scores]
                row += [
                    sum(w * v[j][d] for j, w in enumerate(weights)) / sum(weights) for d in part
                ]
            mixed.append(row)
        xs = [
            norm(
                f"{block}.attention.output.LayerNorm",
                add(linear(f"{block}.attention.output.dense", m), x),
            )
            for m, x in zip(mixed, xs, strict=True)
        ]
        inner = [
            [
                u * (1 + math.erf(u / math.sqrt(2))) / 2
                for u in linear(f"{block}.intermediate.dense", x)
            ]
            for x in xs
        ]
        xs = [
            norm(f"{block}.output.LayerNorm", add(linear(f"{block}.output.dense", u), x))
            for u, x in zip(inner, xs, strict=True)
        ]
    mean = [sum(values) / len(xs) for values in zip(*xs, strict=True)]
    length = math.sqrt(sum(v * v for v in mean))
    return [v / length for v in mean]


@pytest.mark.parametrize(("blocks", "heads"), [(1, 1), (2, 2), (3, 4)])
def test_the_forward_pass_is_that_of_the_paper(blocks: int, heads: int) -> None:
    encoder = random_encoder(blocks, heads)
    found = minilm.embed(encoder, SENTENCES)
    slow = [slow_embedding(encoder, tokens) for tokens in SENTENCES]
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, slow, rtol=0, atol=1e-12)


def test_a_sentence_does_not_see_its_neighbours() -> None:
    encoder = random_encoder()
    alone = np.concatenate([minilm.embed(encoder, [tokens]) for tokens in SENTENCES])
    np.testing.assert_allclose(minilm.embed(encoder, SENTENCES), alone, rtol=0, atol=1e-12)


def test_every_linear_layer_is_watched_once_with_its_input() -> None:
    encoder = random_encoder()
    seen: list[tuple[str, np.ndarray]] = []
    minilm.embed(encoder, SENTENCES, lambda layer, x: seen.append((layer, x.copy())))
    assert tuple(layer for layer, _ in seen) == encoder.linear_layers
    tokens = sum(map(len, SENTENCES))
    for layer, x in seen:
        assert x.shape == (tokens, encoder.weight(layer).shape[1]), layer
    np.testing.assert_array_equal(seen[0][1], seen[1][1])  # query and key read the same


def test_each_linear_layer_matters() -> None:
    encoder = random_encoder()
    exact = minilm.embed(encoder, SENTENCES)
    for layer in encoder.linear_layers:
        changed = encoder.with_weights({layer: encoder.weight(layer) * np.float32(1.5)})
        assert abs(minilm.embed(changed, SENTENCES) - exact).max() > 1e-4, layer
    np.testing.assert_array_equal(minilm.embed(encoder, SENTENCES), exact)


def test_weights_that_do_not_fit_are_refused() -> None:
    encoder = random_encoder()
    with pytest.raises(ValueError, match=r"is \[8, 8\], the new weight \[2, 2\]"):
        encoder.with_weights({encoder.linear_layers[0]: np.zeros((2, 2))})
    with pytest.raises(KeyError):
        encoder.with_weights({"pooler.dense": np.zeros((8, 8))})


@pytest.mark.parametrize("tokens", [[], [1] * (POSITIONS + 1)])
def test_sentences_that_do_not_fit_are_refused(tokens: list[int]) -> None:
    with pytest.raises(
        ValueError, match=f"sentence 1 has {len(tokens)} tokens, not 1 to {POSITIONS}"
    ):
        minilm.embed(random_encoder(), [[1], tokens])


def write_model(folder: Path, encoder: Encoder, **changes: str) -> Path:
    """Files of a model as the package has them, less the tokenizer."""
    from safetensors.numpy import save_file

    config = {
        "model_type": "bert",
        "hidden_act": "gelu",
        "position_embedding_type": "absolute",
        "num_hidden_layers": encoder.blocks,
        "num_attention_heads": encoder.heads,
        "layer_norm_eps": encoder.layer_norm_eps,
    }
    folder.mkdir(exist_ok=True)
    (folder / minilm.CONFIG).write_text(json.dumps(config | changes))
    save_file(dict(encoder.tensors), folder / minilm.WEIGHTS)
    return folder


def test_a_model_is_read_from_its_files(tmp_path: Path) -> None:
    encoder = random_encoder()
    read = minilm.load(write_model(tmp_path, encoder))
    np.testing.assert_array_equal(minilm.embed(read, SENTENCES), minilm.embed(encoder, SENTENCES))


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="hidden_act is 'relu', not 'gelu'"):
        minilm.load(write_model(tmp_path, random_encoder(), hidden_act="relu"))
    half = random_encoder()
    layer = half.linear_layers[3]
    half = half.with_weights({layer: half.weight(layer).astype(np.float16)})
    with pytest.raises(ValueError, match=f"{layer} is float16, not float32"):
        minilm.load(write_model(tmp_path, half))


@pytest.mark.parametrize("missing", [minilm.MODULE, "tokenizers", "safetensors"])
def test_what_is_not_installed_is_named(monkeypatch, missing: str) -> None:
    from importlib.machinery import ModuleSpec

    def find(name: str) -> ModuleSpec | None:
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = ["somewhere"]
        return None if name == missing else spec

    monkeypatch.setattr("importlib.util.find_spec", find)
    with pytest.raises(minilm.MissingModel, match="requirements-accuracy.txt") as error:
        minilm.model_folder()
    assert missing.replace("_", "-") in str(error.value)


# ---- the real model ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed() -> Path:
    try:
        return minilm.model_folder()
    except minilm.MissingModel as error:
        pytest.skip(str(error))


def test_tokens_are_those_of_the_reference_tokenizer(installed: Path) -> None:
    reference = json.loads(REFERENCE.read_text())
    assert minilm.tokenize(installed, reference["sentences"]) == reference["tokens"]


def test_embeddings_are_those_of_the_reference_implementation(installed: Path) -> None:
    """The reference was computed once by the implementation and in the precision that the file names."""
    reference = json.loads(REFERENCE.read_text())
    encoder = minilm.load(installed)
    assert len(encoder.linear_layers) == 36
    found = minilm.embed(encoder, reference["tokens"])
    right = np.array(reference["embeddings"])
    cosines = (found * right).sum(axis=1) / np.linalg.norm(right, axis=1)
    assert cosines.min() > 0.99999
    assert abs(found - right).max() < 1e-4  # the reference is rounded to 4 decimals
