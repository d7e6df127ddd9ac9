"""The kinds of input, by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

from loadtest.fuzz import bulk, files, forms, http, jobs, peers, stored, streams, subjects
from loadtest.fuzz.drive import Fuzzer


@dataclass(frozen=True)
class Kind:
    about: str
    open: Callable[[Path], AbstractAsyncContextManager[Fuzzer]]
    """With an empty folder of its own."""


KINDS = {
    "http": Kind("requests to a router, grown from its OpenAPI document, on a real socket", http.http),
    "jobs": Kind("jobs, batches and files over HTTP, forms in parts among them, on a real nats-server", jobs.jobs),
    "nats": Kind("messages to every subject of all services, on a real server", subjects.subjects),
    "streams": Kind("what follows as a bulk stream: KV of a lease, blocks of an update, cache values", streams.streams),
    "twin": Kind("messages to every subject of a router and workers, on the in-memory bus", subjects.twin_subjects),
    "forms": Kind(
        "deltas, manifests, the change log, rows, batch lines, packed values: what has a layout", forms.forms
    ),
    "bulk": Kind("frames and credits of bulk streams", bulk.bulk),
    "peers": Kind("answers and streams of peers that lie, and of a caller's own service", peers.peers),
    "gguf": Kind("GGUF files: header, metadata, tensor directory, bytes", files.gguf_files),
    "safetensors": Kind("safetensors files of a model folder: header and bytes", files.safetensors),
    "stored": Kind(
        "files that processes find at their start: keys, packs, the disk tier, what they remember", stored.stored
    ),
    "meta": Kind("config, tokenizer and template files, in a folder and as a pushed version", files.meta),
}
