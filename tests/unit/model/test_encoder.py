"""Encoders against transformers, and what a text's vector may depend on."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from pdbus.errors import Corrupt
from pdbus.model.checkpoint import Checkpoint, open_checkpoint
from pdbus.model.encoder import Encoder
from pdbus.model.encoder_build import build_encoder, encoder_compute_class, needed_for_encoder
from pdbus.model.encoder_config import EncoderConfig
from tests.support.encoders import ENCODERS, MOST_TOKENS, VOCAB_SIZE, minilm, reference, tiny_encoder


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def config_of(checkpoint: Checkpoint) -> EncoderConfig:
    assert isinstance(checkpoint.config, EncoderConfig)
    return checkpoint.config


def built(path: Path) -> Encoder:
    checkpoint = open_checkpoint(path)
    return build_encoder(config_of(checkpoint), {}, dict(checkpoint.tensors()))


def texts(seed: int, *lengths: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(5, VOCAB_SIZE) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("family", ENCODERS)
def test_vectors_are_those_of_transformers(tmp_path: Path, family: str, pooling: str, normalize: bool) -> None:
    path = tiny_encoder(tmp_path, family, pooling=pooling, normalize=normalize)
    wanted = texts(1, 3, 11, MOST_TOKENS)
    found = np.concatenate([built(path).embed([ids]) for ids in wanted])
    expected = reference(path, wanted, pooling=pooling, normalize=normalize).numpy()
    assert np.abs(found - expected).max() < 1e-5


def test_the_real_model_is_that_of_transformers() -> None:
    path = minilm()
    checkpoint = open_checkpoint(path)
    assert config_of(checkpoint).max_tokens == 256
    tokenizer = Tokenizer.from_buffer(checkpoint.meta["tokenizer.json"])
    ids = [tokenizer.encode(text).ids for text in ("A cat sat on the mat.", "Where is the station?", "rain " * 200)]
    assert len(ids[2]) == 202, "the truncation that training left in tokenizer.json is gone"
    encoder = built(path)
    found = np.concatenate([encoder.embed([text]) for text in ids])
    assert np.abs(found - reference(path, ids).numpy()).max() < 1e-5
    assert np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 17, MOST_TOKENS])
def test_a_vector_has_the_same_bits_in_every_company(tmp_path: Path, length: int) -> None:
    encoder = built(tiny_encoder(tmp_path))
    many = texts(length, *[length] * 16)
    alone = np.concatenate([encoder.embed([text]) for text in many])
    for start, stop in ((0, 2), (3, 10), (0, 16)):
        assert np.array_equal(encoder.embed(many[start:stop]), alone[start:stop])


def test_a_real_vector_has_the_same_bits_in_every_company() -> None:
    encoder = built(minilm())
    for length in (3, 9):
        many = texts(length, *[length] * 7)
        alone = np.concatenate([encoder.embed([text]) for text in many])
        assert np.array_equal(encoder.embed(many), alone)
        assert np.array_equal(encoder.embed(many[2:5]), alone[2:5])


def test_unchanged_layers_are_shared_with_an_older_version(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_encoder(tmp_path))
    config, tensors = config_of(checkpoint), dict(checkpoint.tensors())
    old = build_encoder(config, {"embed": b"e", "layers.0": b"0", "layers.1": b"1"}, tensors)
    digests = {"embed": b"e", "layers.0": b"0", "layers.1": b"changed"}
    needed = needed_for_encoder(config, digests, old)
    assert needed
    assert all(name.startswith("encoder.layer.1.") for name in needed)
    changed = {name: tensors[name] + 1 for name in needed}
    new = build_encoder(config, digests, changed, old)
    assert new.layers[0] is old.layers[0]
    assert new.embedding is old.embedding
    whole = build_encoder(config, {}, tensors | changed)
    assert np.array_equal(new.embed([[5, 6, 7]]), whole.embed([[5, 6, 7]]))
    assert not np.array_equal(new.embed([[5, 6, 7]]), old.embed([[5, 6, 7]]))


def test_tensors_that_don_t_fit_are_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_encoder(tmp_path))
    config, tensors = config_of(checkpoint), dict(checkpoint.tensors())
    name = "encoder.layer.0.output.dense.weight"
    for broken in ({k: v for k, v in tensors.items() if k != name}, tensors | {name: tensors[name].T}):
        with pytest.raises(Corrupt, match=name):
            build_encoder(config, {}, broken)


def test_the_compute_class_names_what_numbers_depend_on() -> None:
    told = encoder_compute_class("cpu")
    assert torch.__version__.lower() in told
    assert "fp32" in told
