"""What is compared: versions that differ in just these layers."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.tiny import tiny_checkpoint
from loadtest.two_roots import changed, measure_two_roots, versions
from loadtest.upper_update import measure_upper_update
from pdbus.model.backends import BackendOptions, open_backend
from pdbus.model.checkpoint import open_checkpoint
from pdbus.model.families import writing
from pdbus.native.build import levels


@pytest.mark.skipif(not levels(), reason="no kernels for this processor")
def test_the_versions_share_all_other_layers(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint(tmp_path / "tiny"))
    config = writing(checkpoint.config)
    backend = open_backend(BackendOptions("native"), config)
    one, other = versions(backend, checkpoint, changed(config, 1))
    assert {name for name in one.digests if one.digests[name] != other.digests[name]} == {"layers.1"}
    assert [mine is its for mine, its in zip(one.layers, other.layers, strict=True)] == [True, False]  # type: ignore[attr-defined]
    backend.close()
    found = measure_two_roots(checkpoint, threads=1, context_tokens=20, rounds=1, steps=1)
    assert min(found.one_root, found.together, found.apart, found.share) > 0


@pytest.mark.skipif(not levels(), reason="no kernels for this processor")
def test_an_update_of_the_upper_half_is_measured(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint(tmp_path / "tiny"))
    found = measure_upper_update(checkpoint, threads=1, prompt_tokens=70, groups=2, rounds=1)
    assert found.layer == 1
    assert min(found.cold_s, found.resumed_s - found.hit_s, found.hit_s, found.stream_share) > 0
