from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdbus.errors import InvalidRequest
from pdbus.model.checkpoint import open_checkpoint
from pdbus.model.config import RopeScaling
from pdbus.model.default import default_checkpoint
from pdbus.model.refusal import CheckpointError, UnsupportedModel
from pdbus.model.rope_config import llama3_divisors
from tests.support.checkpoints import tiny_checkpoint
from tests.support.gguf_files import tiny_gguf

LLAMA3 = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("hf"), "llama", tie_word_embeddings=False)


@pytest.fixture(scope="module")
def llama_bytes(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return tiny_gguf(llama, tmp_path_factory.mktemp("gguf") / "tiny.gguf").read_bytes()


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_gguf_file_holds_the_same_model_as_the_folder_it_was_made_from(tmp_path: Path, family: str) -> None:
    window = {"sliding_window": 24} if family == "mistral" else {}
    folder = tiny_checkpoint(tmp_path, family, **window)
    keys = {"llama.attention.sliding_window": 24} if family == "mistral" else {}
    expected = open_checkpoint(folder)
    found = open_checkpoint(tiny_gguf(folder, tmp_path / "Tiny-Model.F32.gguf", metadata=keys))
    assert found.name == "tiny-model"
    assert found.config == expected.config
    for (name, tensor), (expected_name, expected_tensor) in zip(found.tensors(), expected.tensors(), strict=True):
        assert name == expected_name
        assert np.array_equal(tensor, expected_tensor), name
        assert tensor.dtype == np.float32
        assert tensor.flags.c_contiguous


def test_biases_of_llama_are_found_by_their_tensors(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "llama", attention_bias=True, mlp_bias=True)
    found = open_checkpoint(tiny_gguf(folder, tmp_path / "tiny.gguf"))
    assert (found.config.attention_bias, found.config.attention_out_bias, found.config.mlp_bias) == (True, True, True)
    expected = dict(open_checkpoint(folder).tensors())
    assert all(np.array_equal(tensor, expected[name]) for name, tensor in found.tensors())


@pytest.mark.parametrize(
    ("quantised", "relative_error"), [("F16", 2**-11), ("BF16", 2**-8), ("Q8_0", 2**-7), ("Q4_1", 2**-3)]
)
def test_quantised_matrices_come_back_within_the_error_of_their_format(
    llama: Path, tmp_path: Path, quantised: str, relative_error: float
) -> None:
    exact = dict(open_checkpoint(llama).tensors())
    for name, tensor in open_checkpoint(tiny_gguf(llama, tmp_path / "tiny.gguf", quantised=quantised)).tensors():
        assert np.abs(tensor - exact[name]).max() <= relative_error * np.abs(exact[name]).max(), name


def test_rope_scaling_of_llama_3_is_recognised_by_its_frequencies(llama: Path, tmp_path: Path) -> None:
    divisors = np.array(llama3_divisors(LLAMA3, 10_000.0, 16), dtype=np.float32)
    file = tiny_gguf(llama, tmp_path / "tiny.gguf", tensors={"rope_freqs.weight": divisors})
    assert open_checkpoint(file).config.rope_scaling == LLAMA3
    other = np.linspace(1.0, 8.0, 8, dtype=np.float32)
    file = tiny_gguf(llama, tmp_path / "other.gguf", tensors={"rope_freqs.weight": other})
    with pytest.raises(UnsupportedModel, match="other frequencies"):
        open_checkpoint(file)


@pytest.mark.parametrize(("divisor", "theta"), [(0.0, 1e4), (-1.0, 1e4), (np.nan, 1e4), (8.0, 0.0), (8.0, -1e4)])
def test_frequencies_that_can_not_be_are_refused(llama: Path, tmp_path: Path, divisor: float, theta: float) -> None:
    divisors = np.full(8, divisor, np.float32)
    metadata = {"llama.rope.freq_base": theta}
    file = tiny_gguf(llama, tmp_path / "x.gguf", metadata=metadata, tensors={"rope_freqs.weight": divisors})
    with pytest.raises(CheckpointError, match="above 0"):
        open_checkpoint(file)


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, "yarn"),
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"split.count": 3}, "split GGUF"),
        ({"llama.rope.dimension_count": 8}, "turn whole"),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.block_count": 3}, "model.layers.2.input_layernorm.weight is missing"),
        ({"llama.block_count": "two"}, "must be an integer"),
        ({"llama.feed_forward_length": 97}, "mlp.gate_proj.weight has shape"),
        ({"llama.attention.head_count": 0}, "num_attention_heads"),
    ],
)
def test_what_is_not_served_is_refused_with_the_reason(
    llama: Path, tmp_path: Path, metadata: dict[str, object], reason: str
) -> None:
    file = tiny_gguf(llama, tmp_path / "tiny.gguf", metadata=metadata)
    with pytest.raises(CheckpointError, match=reason) as refusal:
        open_checkpoint(file)
    assert str(file) in refusal.value.message


def test_a_missing_and_a_foreign_tensor_are_named(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is missing"):
        open_checkpoint(tiny_gguf(llama, tmp_path / "a.gguf", tensors={"output_norm.weight": None}))
    foreign = {"blk.0.attn_qkv.weight": np.zeros((4, 4), np.float32)}
    with pytest.raises(CheckpointError, match=r"attn_qkv\.weight has no place"):
        open_checkpoint(tiny_gguf(llama, tmp_path / "b.gguf", tensors=foreign))


def _entry(key: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value


HUGE = 1 << 60


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GGUF",
        b"PK\x03\x04" + bytes(64),
        b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
        b"GGUF" + struct.pack("<IQQ", 99, 0, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE),
        b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0),
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, HUGE),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + _entry(b"a", 8, struct.pack("<Q", HUGE)),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + _entry(b"a", 9, struct.pack("<IQ", 0, HUGE)),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + _entry(b"a", 9, struct.pack("<IQ", 8, HUGE)),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + _entry(b"a", 9, struct.pack("<IQ", 9, 1)),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + _entry(b"a", 77, b""),
        b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<QcI4QIQ", 1, b"t", 4, HUGE, HUGE, 1, 1, 0, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<QcI", 1, b"t", 1 << 31),
    ],
)
def test_a_false_header_is_refused_at_once(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "false.gguf"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"false\.gguf"):
        open_checkpoint(file)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 9000), patch=st.binary(min_size=1, max_size=9), keep=st.floats(0, 1))
def test_a_damaged_file_is_opened_or_refused_but_never_crashes(
    llama_bytes: bytes, tmp_path: Path, at: int, patch: bytes, keep: float
) -> None:
    damaged = llama_bytes[:at] + patch + llama_bytes[at + len(patch) :]
    file = tmp_path / "damaged.gguf"
    file.write_bytes(damaged if keep > 0.5 else damaged[: int(2 * keep * len(damaged))])
    try:
        checkpoint = open_checkpoint(file)
    except InvalidRequest as error:
        assert "damaged.gguf" in error.message  # noqa: PT017 - both outcomes are fine
    else:
        assert len(list(checkpoint.tensors())) == len(checkpoint.source.shapes)


def test_the_default_model_is_served(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(default_checkpoint())
    assert checkpoint.name == "smollm2-135m-instruct"
    assert (checkpoint.config.layers, checkpoint.config.tied_embeddings) == (30, True)
    assert json.loads(checkpoint.meta["generation_config.json"])["eos_token_id"] == [2]
    assert b"<|im_start|>" in checkpoint.meta["chat_template.jinja"]
