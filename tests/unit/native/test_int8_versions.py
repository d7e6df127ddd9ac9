"""A worker that loads a version made in int8 computes, to the bit, what one does that quantised the version in fp32."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdbus.caching.cache_folder import CacheFolder
from pdbus.context import RequestContext
from pdbus.engine.failure import NotYet
from pdbus.engine.version import Version, load
from pdbus.model.backend import Backend
from pdbus.model.backends import BackendOptions, open_backend
from pdbus.model.batch import Batch, SequenceSlice
from pdbus.model.checkpoint import Checkpoint, open_checkpoint
from pdbus.model.convert import converted, plan
from pdbus.model.parts import EMBEDDING
from pdbus.native.build import levels
from pdbus.weights.blocks import Array, cut
from pdbus.weights.layer import Tensor, layer_of, meta_tensor
from pdbus.weights.manifest import Manifest
from pdbus.weights.packed import Int8Rows, widened
from tests.support.checkpoints import Family, tiny_checkpoint
from tests.support.weights import content_digest, manifest_and_blocks

pytestmark = pytest.mark.skipif(not levels(), reason="no kernels for this processor")


class Source:
    """A checkpoint's version in fp32, and what is made of it in int8."""

    def __init__(self, checkpoint: Checkpoint, precision: str = "int8", **changed: Array) -> None:
        """`changed`: tensors by their names with _ for each dot."""
        self.arrays = {name: changed.get(name.replace(".", "_"), array) for name, array in checkpoint.tensors()}
        self.files = checkpoint.meta
        self.fp32, _ = manifest_and_blocks(self.arrays, checkpoint.meta)
        stay, made = plan(checkpoint.config, self.fp32.tensors, precision)
        self.packed = {one.name: converted(one.name, self.arrays[one.source.name], one.dtype) for one in made}
        tensors = [
            Tensor(one.name, one.dtype, one.source.shape, tuple(map(content_digest, cut(self.packed[one.name]))))
            for one in made
            if one.source.nbytes < 3_000_000
        ]
        assert len(tensors) == len(made)
        self.derived = Manifest.build([*stay, *tensors])
        self.fetched: list[tuple[bytes, str]] = []

    def in_int8(self, root: bytes) -> tuple[bytes, bytes] | None:
        return self.fp32.root, self.derived.root

    def int8_is_coming(self, root: bytes, nbytes: int) -> bool:
        raise AssertionError("it is there, or nothing else serves")

    async def manifest(self, root: bytes, ctx: RequestContext) -> Manifest:
        return self.derived if root == self.derived.root else self.fp32

    async def meta(self, root: bytes, ctx: RequestContext) -> Mapping[str, bytes]:
        return self.files

    async def stored(self, root: bytes, ctx: Any, names: Any = None, *, rows: Any = None, progress: Any = None) -> Any:
        manifest = await self.manifest(root, ctx)
        found: dict[str, Array | Int8Rows] = {}
        for name in names:
            self.fetched.append((root, name))
            tensor = manifest.tensors[name]
            if tensor.dtype == "fp32":
                found[name] = self.arrays[name][rows or slice(None)]
                continue
            packed = self.packed[name][rows or slice(None)]
            is_int8 = tensor.dtype == "int8"
            shape = (len(packed), *tensor.shape[1:])
            found[name] = Int8Rows.unpacked(packed, shape[1]) if is_int8 else widened(tensor.dtype, packed, shape)
        return found

    async def runs(self, root: bytes, ctx: Any, runs: Any, *, progress: Any = None) -> Any:
        return [(await self.stored(root, ctx, [run.tensor], rows=run.rows))[run.tensor] for run in runs]

    async def tensors(self, *args: Any, **options: Any) -> Any:
        found = await self.stored(*args, **options)
        return {name: one.widened() if isinstance(one, Int8Rows) else one for name, one in found.items()}


@pytest.fixture(scope="module", params=["llama", "mistral", "qwen2"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    family: Family = request.param  # with a tied head, with one of its own, and with biases
    return open_checkpoint(tiny_checkpoint(tmp_path_factory.mktemp("model"), family))


@pytest.fixture
def backend(checkpoint: Checkpoint) -> Iterator[Backend]:
    made = open_backend(BackendOptions("native", "int8", "int8"), checkpoint.config)
    yield made
    made.close()


def loaded(backend: Backend, source: Source, root: bytes, *others: Version, int8: bool = True) -> Version:
    async def backend_for(config: object) -> Backend:
        return backend

    told = lambda done, total: None  # noqa: E731
    return asyncio.run(load(root, source, others, backend_for, told, int8=source if int8 else None))


def logits(backend: Backend, version: Version) -> np.ndarray:
    pool = backend.pool(version.scope.page_format, 2)
    tokens = list(range(3, 23))
    return version.model.forward(Batch(tokens, [SequenceSlice(0, 20, 0, [0, 1])], list(range(20))), pool)


def test_the_version_made_in_int8_computes_the_same_bits(backend: Backend, checkpoint: Checkpoint) -> None:
    source = Source(checkpoint)
    own = loaded(backend, source, source.fp32.root, int8=False)
    assert {root for root, _ in source.fetched} == {source.fp32.root}
    source.fetched.clear()
    made = loaded(backend, source, source.derived.root)
    assert {root for root, _ in source.fetched} == {source.derived.root}
    assert np.array_equal(logits(backend, made), logits(backend, own))
    assert made.root != own.root
    assert made.scope.kv_root != own.scope.kv_root


def test_asked_for_the_version_in_fp32_it_fetches_the_smaller_one_and_names_that_which_was_asked_for(
    backend: Backend, checkpoint: Checkpoint
) -> None:
    source = Source(checkpoint)
    own = loaded(backend, source, source.fp32.root, int8=False)
    source.fetched.clear()
    made = loaded(backend, source, source.fp32.root)
    assert {root for root, _ in source.fetched} == {source.derived.root}
    assert np.array_equal(logits(backend, made), logits(backend, own))
    assert (made.root, made.scope) == (own.root, own.scope)


def test_both_are_one_in_memory(backend: Backend, checkpoint: Checkpoint) -> None:
    source = Source(checkpoint)
    own = loaded(backend, source, source.fp32.root, int8=False)
    source.fetched.clear()
    made: Any = loaded(backend, source, source.derived.root, own).model
    assert source.fetched == []
    first: Any = own.model
    assert all(one is other for one, other in zip(made.layers, first.layers, strict=True))
    assert made.head is first.head


@pytest.mark.parametrize("weight_bytes", [None, 1 << 30], ids=["packed on disk", "streamed"])
@pytest.mark.parametrize("asks_int8_first", [False, True])
def test_what_the_disk_keeps_of_one_of_them_serves_for_either(
    backend: Backend, checkpoint: Checkpoint, tmp_path: Path, weight_bytes: int | None, asks_int8_first: bool
) -> None:
    source = Source(checkpoint)
    wanted = logits(backend, loaded(backend, source, source.fp32.root, int8=False))
    roots = [source.derived.root, source.fp32.root]
    folder = CacheFolder(tmp_path, 1 << 30)
    for root, int8 in zip(roots if asks_int8_first else roots[::-1], (asks_int8_first, True, True), strict=False):
        source.fetched.clear()
        kept = open_backend(
            BackendOptions("native", "int8", "int8", folder=folder, weight_bytes=weight_bytes), checkpoint.config
        )
        try:
            assert np.array_equal(logits(kept, loaded(kept, source, root, int8=int8)), wanted)
        finally:
            kept.close()
    layers = {name for _, name in source.fetched if layer_of(name).startswith("layers.")}
    assert layers == set()


def test_a_version_in_int8_whose_source_is_gone_is_streamed_as_it_is(
    backend: Backend, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    source = Source(checkpoint)
    wanted = logits(backend, loaded(backend, source, source.fp32.root, int8=False))
    source.in_int8 = lambda root: None  # type: ignore[method-assign]
    folder = CacheFolder(tmp_path, 1 << 30)
    streaming = open_backend(
        BackendOptions("native", "int8", "int8", folder=folder, weight_bytes=1 << 30), checkpoint.config
    )
    try:
        made = loaded(streaming, source, source.derived.root)
        assert {root for root, _ in source.fetched[-1:]} == {source.derived.root}
        assert np.array_equal(logits(streaming, made), wanted)
    finally:
        streaming.close()


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp8"])
def test_other_precisions_are_widened_before_they_are_computed_with(
    backend: Backend, checkpoint: Checkpoint, precision: str
) -> None:
    source = Source(checkpoint, precision)
    source.in_int8 = lambda root: None  # type: ignore[method-assign]
    made = loaded(backend, source, source.derived.root)
    wide = Source(checkpoint)
    wide.arrays = {
        name: widened(tensor.dtype, source.packed[name], tensor.shape) if name in source.packed else wide.arrays[name]
        for name, tensor in source.derived.tensors.items()
        if layer_of(name) != "meta"
    }
    assert not np.array_equal(wide.arrays[EMBEDDING], source.arrays[EMBEDDING])
    assert np.array_equal(logits(backend, made), logits(backend, loaded(backend, wide, wide.fp32.root, int8=False)))


def test_without_int8_of_its_own_a_backend_widens(checkpoint: Checkpoint) -> None:
    source = Source(checkpoint)
    backend = open_backend(BackendOptions("native", "fp32", "fp32"), checkpoint.config)
    try:
        made = loaded(backend, source, source.derived.root)
        assert np.isfinite(logits(backend, made)).all()
        assert "w-fp32" in backend.compute_class
    finally:
        backend.close()


class Line(Source):
    """A version, and an older one that is loaded already. `made`: whether the former is there in int8; None: soon."""

    def __init__(self, checkpoint: Checkpoint, **changed: Array) -> None:
        super().__init__(checkpoint, **changed)
        self.older = Source(checkpoint)
        self.made: bool | None = True

    def in_int8(self, root: bytes) -> tuple[bytes, bytes] | None:
        if root in (self.older.fp32.root, self.older.derived.root):
            return self.older.in_int8(root)
        return super().in_int8(root) if self.made else None

    def int8_is_coming(self, root: bytes, nbytes: int) -> bool:
        assert nbytes == sum(tensor.nbytes for tensor in self.fp32.tensors.values() if tensor.dtype == "fp32")
        return self.made is None

    async def manifest(self, root: bytes, ctx: RequestContext) -> Manifest:
        of = self.older if root in (self.older.fp32.root, self.older.derived.root) else super()
        return await of.manifest(root, ctx)


def changed_line(checkpoint: Checkpoint, *names: str) -> Line:
    arrays = dict(checkpoint.tensors())
    return Line(checkpoint, **{name.replace(".", "_"): arrays[name] + np.float32(0.25) for name in names or arrays})


@pytest.mark.parametrize("made", [True, None], ids=["made", "not yet"])
def test_few_changed_rows_are_taken_in_fp32_though_there_are_layers_in_int8(
    backend: Backend, checkpoint: Checkpoint, made: bool | None
) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    line = changed_line(checkpoint, name)
    before = loaded(backend, line.older, line.older.derived.root)
    line.made = made
    now = loaded(backend, line, line.fp32.root, before)
    assert line.fetched == [(line.fp32.root, name)]
    line.made, line.fetched = True, []
    assert np.array_equal(logits(backend, loaded(backend, line, line.derived.root, now)), logits(backend, now))
    assert line.fetched == []
    assert np.array_equal(logits(backend, now), logits(backend, loaded(backend, line, line.fp32.root, int8=False)))


def test_rows_of_a_tied_head_are_taken_in_fp32_too(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint(tmp_path, "llama", vocab_size=6000))
    embedding = dict(checkpoint.tensors())[EMBEDDING].copy()
    embedding[5000:5010] += 0.5
    line = Line(checkpoint, **{EMBEDDING.replace(".", "_"): embedding})
    assert len(line.fp32.tensors[EMBEDDING].blocks) > 4
    made = open_backend(BackendOptions("native", "int8", "int8"), checkpoint.config)
    try:
        before = loaded(made, line.older, line.older.derived.root)
        now = loaded(made, line, line.fp32.root, before)
        assert line.fetched == [(line.fp32.root, EMBEDDING)]
        assert np.array_equal(logits(made, now), logits(made, loaded(made, line, line.fp32.root, int8=False)))
    finally:
        made.close()


def test_whole_layers_are_waited_for_in_int8_and_taken_as_they_are_where_that_is_not_made(
    backend: Backend, checkpoint: Checkpoint
) -> None:
    line = changed_line(checkpoint)
    before = loaded(backend, line.older, line.older.derived.root)
    line.made = None
    with pytest.raises(NotYet):
        loaded(backend, line, line.fp32.root, before)
    assert line.fetched == []
    for made in (True, False):
        line.made, line.fetched = made, []
        now = loaded(backend, line, line.fp32.root, before)
        assert {root for root, _ in line.fetched} == {line.derived.root if made else line.fp32.root}
        assert now.root == line.fp32.root
        assert np.array_equal(logits(backend, now), logits(backend, loaded(backend, line, line.fp32.root, int8=False)))


def test_a_first_version_waits_for_nothing(backend: Backend, checkpoint: Checkpoint) -> None:
    line = changed_line(checkpoint)
    line.made = None
    loaded(backend, line, line.fp32.root)
    assert {root for root, _ in line.fetched} == {line.fp32.root}


def test_files_stay(checkpoint: Checkpoint) -> None:
    source = Source(checkpoint)
    name = meta_tensor("config.json")
    assert source.derived.tensors[name] == source.fp32.tensors[name]
