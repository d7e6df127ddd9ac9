"""Encoder folders: what is read of them, and which are refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from pdbus.errors import InvalidRequest
from pdbus.model.checkpoint import open_checkpoint
from pdbus.model.encoder_config import EncoderConfig, Sentence
from pdbus.model.families import config_of, expected, writing
from pdbus.model.refusal import UnsupportedModel
from tests.support.checkpoints import tiny_checkpoint
from tests.support.encoders import MOST_TOKENS, tiny_encoder, write_sentence


def edit(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return tiny_encoder(tmp_path)


def sentence(path: Path) -> Sentence:
    config = open_checkpoint(path).config
    assert isinstance(config, EncoderConfig)
    return config.sentence


def test_meta_makes_the_same_config_again(bert: Path) -> None:
    checkpoint = open_checkpoint(bert)
    assert config_of(checkpoint.meta) == checkpoint.config
    assert [name for name, _ in checkpoint.tensors()] == list(expected(checkpoint.config))
    assert {"config.json", "tokenizer.json", "sentence.json"} <= checkpoint.meta.keys()


def test_how_vectors_are_pooled_is_part_of_meta(bert: Path) -> None:
    before = open_checkpoint(bert).meta
    write_sentence(bert, "cls", normalize=False)
    assert sentence(bert) == Sentence("cls", False, MOST_TOKENS)
    assert open_checkpoint(bert).meta != before


def test_as_newer_versions_of_sentence_transformers_write_it(bert: Path) -> None:
    (bert / "1_Pooling" / "config.json").write_text(json.dumps({"embedding_dimension": 32, "pooling_mode": "cls"}))
    modules = json.loads((bert / "modules.json").read_text())
    for module in modules:
        module["type"] = "sentence_transformers.base.modules." + module["type"].rpartition(".")[2]
    (bert / "modules.json").write_text(json.dumps(modules))
    assert sentence(bert).pooling == "cls"


def test_without_a_word_on_it_the_mean_is_taken_of_as_many_tokens_as_have_positions(bert: Path) -> None:
    for name in ("modules.json", "sentence_bert_config.json"):
        (bert / name).unlink()
    assert sentence(bert) == Sentence("mean", False, None)
    config = open_checkpoint(bert).config
    assert isinstance(config, EncoderConfig)
    assert config.max_tokens == 64


def test_roberta_begins_its_positions_behind_the_padding(tmp_path: Path) -> None:
    path = tiny_encoder(tmp_path, "roberta", pad_token_id=1)
    edit(path / "sentence_bert_config.json", max_seq_length=None)
    config = open_checkpoint(path).config
    assert isinstance(config, EncoderConfig)
    assert (config.first_position, config.max_tokens) == (2, 62)


def test_what_vectors_don_t_depend_on_stays_out(bert: Path) -> None:
    tensors = load_file(bert / "model.safetensors")
    assert "pooler.dense.weight" in tensors
    tensors["embeddings.position_ids"] = torch.arange(64)[None]
    save_file(tensors, bert / "model.safetensors", {"format": "pt"})
    assert not any("pooler" in name or "position_ids" in name for name, _ in open_checkpoint(bert).tensors())


def test_a_head_makes_it_another_model(bert: Path) -> None:
    tensors = load_file(bert / "model.safetensors")
    save_file(tensors | {"classifier.weight": torch.zeros(2, 32)}, bert / "model.safetensors", {"format": "pt"})
    with pytest.raises(InvalidRequest, match=r"classifier\.weight has no place in a bert model"):
        open_checkpoint(bert)


@pytest.mark.parametrize(
    ("file", "fields", "reason"),
    [
        ("config.json", {"hidden_act": "relu"}, "only gelu"),
        ("config.json", {"position_embedding_type": "relative_key"}, "only absolute"),
        ("config.json", {"is_decoder": True}, "not an encoder"),
        ("config.json", {"num_attention_heads": 5}, "not a multiple"),
        ("config.json", {"quantization_config": {}}, "quantised"),
        ("config.json", {"model_type": "deberta"}, "not served; these are: llama, .*bert"),
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "pooling by mean"),
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": False}, "pooling by mean"),
        ("1_Pooling/config.json", {"pooling_mode": "lasttoken"}, "pooling by mean"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case"),
        ("sentence_bert_config.json", {"max_seq_length": -1}, "max_seq_length"),
    ],
)
def test_what_would_give_other_vectors_is_refused(bert: Path, file: str, fields: dict[str, Any], reason: str) -> None:
    edit(bert / file, **fields)
    with pytest.raises(UnsupportedModel, match=reason):
        open_checkpoint(bert)


def test_another_order_of_modules_and_a_prompt_are_refused(bert: Path) -> None:
    prompts = {"default_prompt_name": "query", "prompts": {"query": "query: "}}
    (bert / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    with pytest.raises(UnsupportedModel, match="default_prompt_name"):
        open_checkpoint(bert)
    (bert / "config_sentence_transformers.json").unlink()
    modules = json.loads((bert / "modules.json").read_text())
    (bert / "modules.json").write_text(json.dumps([*modules, {"type": "sentence_transformers.models.Dense"}]))
    with pytest.raises(UnsupportedModel, match="Dense"):
        open_checkpoint(bert)


@pytest.mark.parametrize("name", [{}, [], 7])
def test_a_prompt_s_name_that_is_no_text_names_none(bert: Path, name: object) -> None:
    (bert / "config_sentence_transformers.json").write_text(json.dumps({"default_prompt_name": name, "prompts": {}}))
    assert sentence(bert) == Sentence("mean", True, MOST_TOKENS)


def test_the_pooling_of_another_folder_is_not_read(bert: Path) -> None:
    modules = json.loads((bert / "modules.json").read_text())
    modules[1]["path"] = "../elsewhere"
    (bert / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(InvalidRequest, match="not the name of a folder"):
        open_checkpoint(bert)


def test_from_the_hub_come_the_files_of_sentence_transformers_too(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def snapshot_download(hub_id: str, *, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(bert)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert isinstance(open_checkpoint("someone/an-encoder").config, EncoderConfig)
    assert {"modules.json", "*/config.json"} <= set(asked[0])


def test_only_models_that_write_can_decode(bert: Path, tmp_path: Path) -> None:
    llama = open_checkpoint(tiny_checkpoint(tmp_path, "llama")).config
    assert writing(llama) is llama
    with pytest.raises(UnsupportedModel, match="embeds texts"):
        writing(open_checkpoint(bert).config)
