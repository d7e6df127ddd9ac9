"""Which engine computes, and what it says where the native one can't."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator

import pytest
import torch

from pdbus.errors import Corrupt, InvalidRequest
from pdbus.model.backend import Backend, Model
from pdbus.model.backends import BackendOptions, PrecisionChoice, open_backend
from pdbus.model.checkpoint import Checkpoint, open_checkpoint
from pdbus.model.native_backend import NativeBackend, Precision
from pdbus.model.torch_backend import TorchBackend
from pdbus.native.build import levels
from pdbus.weights.layer import layer_of
from tests.support.checkpoints import tiny_checkpoint

PRECISIONS: tuple[Precision, ...] = ("fp32", "int8", "int4")

needs_native = pytest.mark.skipif(not levels(), reason="no kernels for this processor")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    torch.set_num_threads(1)
    return open_checkpoint(str(tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama")))


@pytest.fixture
def native(checkpoint: Checkpoint) -> Iterator[Backend]:
    backend = open_backend(BackendOptions("native", "int8", "int8"), checkpoint.config)
    yield backend
    backend.close()


@needs_native
def test_the_native_engine_is_the_default_on_a_cpu(checkpoint: Checkpoint) -> None:
    backend = open_backend(BackendOptions(), checkpoint.config)
    assert isinstance(backend, NativeBackend)
    backend.close()


@needs_native
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (BackendOptions(), "w-int8-groups/kv-int8"),
        (BackendOptions(precision="fp32"), "w-fp32/kv-fp32"),
        (BackendOptions(precision="int4"), "w-int4-groups/kv-int8"),
        (BackendOptions(kv_dtype="fp16"), "w-int8-groups/kv-fp16"),
        (BackendOptions(precision="fp32", kv_dtype="int8"), "w-fp32/kv-int8"),
        (BackendOptions("torch"), "w-fp32/a-fp32/kv-fp32"),
        (BackendOptions("torch", kv_dtype="int8"), "w-fp32/a-fp32/kv-int8"),
    ],
    ids=str,
)
def test_what_is_left_open_is_chosen_with_the_engine_and_told(
    checkpoint: Checkpoint, options: BackendOptions, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        backend = open_backend(options, checkpoint.config)
    assert told in backend.compute_class
    assert backend.compute_class in caplog.text
    backend.close()


def test_torch_computes_where_it_is_asked_to(checkpoint: Checkpoint) -> None:
    assert isinstance(open_backend(BackendOptions("torch"), checkpoint.config), TorchBackend)


@pytest.mark.parametrize("precision", ["fp32", "int8", "auto"])
def test_without_a_compiler_torch_computes_and_the_log_says_why(
    checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    precision: PrecisionChoice,
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with caplog.at_level(logging.WARNING):
        backend = open_backend(BackendOptions(precision=precision), checkpoint.config)
    assert isinstance(backend, TorchBackend)
    assert "w-fp32/a-fp32/kv-fp32" in backend.compute_class
    assert "native engine" in caplog.text
    assert ("in fp32 instead of int8" in caplog.text) == (precision != "fp32")
    with pytest.raises(InvalidRequest, match="native engine can't serve here"):
        open_backend(BackendOptions("native", precision), checkpoint.config)


@needs_native
def test_a_model_that_does_not_fit_the_kernels_is_left_to_torch(checkpoint: Checkpoint) -> None:
    odd = dataclasses.replace(checkpoint.config, head_dim=24)
    assert isinstance(open_backend(BackendOptions(), odd), TorchBackend)


@needs_native
def test_engines_and_precisions_never_share_numbers_or_pages(checkpoint: Checkpoint) -> None:
    kinds = [BackendOptions("torch"), *(BackendOptions("native", one, "fp32") for one in PRECISIONS)]
    backends = [open_backend(options, checkpoint.config) for options in kinds]
    assert len({backend.compute_class for backend in backends}) == 4
    torch_pages, *native_pages = [str(backend.page_format(checkpoint.config)) for backend in backends]
    assert {*native_pages} == {torch_pages.replace("kv1", "kv3")}
    for backend in backends:
        backend.close()


@needs_native
def test_a_kv_dtype_is_in_class_and_pages(native: Backend, checkpoint: Checkpoint) -> None:
    assert native.compute_class.endswith("/kv-int8")
    page_format = native.page_format(checkpoint.config)
    assert page_format.dtype == "int8"
    assert native.pool(page_format, 3).pages == 3


@needs_native
def test_only_what_changed_is_needed_for_the_next_version(native: Backend, checkpoint: Checkpoint) -> None:
    tensors = dict(checkpoint.tensors())
    digests = {name: name.encode().ljust(32) for name in ("embed", "layers.0", "layers.1", "head")}
    assert needed(native, checkpoint, digests, None) == set(tensors)
    old = native.build(checkpoint.config, digests, tensors, None)
    assert needed(native, checkpoint, digests, old) == set()
    for changed in digests:
        newer = digests | {changed: bytes(32)}
        names = needed(native, checkpoint, newer, old)
        assert names == {name for name in tensors if layer_of(name) == changed}
        native.build(checkpoint.config, newer, {name: tensors[name] for name in names}, old)


def needed(backend: Backend, checkpoint: Checkpoint, digests: dict[str, bytes], old: Model | None) -> set[str]:
    return {name for part in backend.begin(checkpoint.config, digests, old).parts for name in part.shapes}


@needs_native
def test_a_tensor_of_another_shape_is_refused(native: Backend, checkpoint: Checkpoint) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    tensors = dict(checkpoint.tensors())
    with pytest.raises(Corrupt, match="down_proj"):
        native.build(checkpoint.config, {}, tensors | {name: tensors[name][:-1]}, None)
    del tensors[name]
    with pytest.raises(Corrupt, match="missing"):
        native.build(checkpoint.config, {}, tensors, None)
