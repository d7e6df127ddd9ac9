"""The paged KV store of a torch engine: the bytes behind the page numbers of kv/pages.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pdbus.buffer import Buffer
from pdbus.kv.codec import lend_rows, read_rows, write_rows
from pdbus.kv.format import NO_STREAMS, KvDtype, PageFormat, StreamFormat

_TORCH_DTYPES: dict[KvDtype, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "int8": torch.int8}
_FP16_LARGEST = 65504.0
_INT8_LARGEST = 127.0
_SMALLEST_SCALE = 2.0**-126
"""The smallest normal fp32: a head of zeros, or nearly so, divides by this and not by 0."""


@dataclass(frozen=True, slots=True)
class Slots:
    """A place in the pool for each of a step's tokens: its page and its offset there, both [tokens]."""

    pages: Tensor
    offsets: Tensor


class KvPool:
    """Pages in the layout kv1 of kv/format.py: one tensor of bytes, [layers, pages, layer_bytes], and views of it.

    It knows nothing of ownership: callers write only to pages that they hold and that are not published. Pages start
    undefined, and on the CPU take no memory until they are written."""

    def __init__(
        self,
        page_format: PageFormat,
        pages: int,
        device: torch.device | str = "cpu",
        streams: StreamFormat = NO_STREAMS,
    ) -> None:
        self.format, self.streams = page_format, streams
        self.pages = pages
        self.device = torch.device(device)
        kept = (pages, page_format.page_tokens, streams.hidden)
        self._streams = {layer: torch.empty(kept, device=self.device) for layer in streams.layers}
        size = (page_format.layers, pages, page_format.layer_bytes)
        self.bytes = torch.empty(size, dtype=torch.uint8, device=self.device)
        """All there is, [layers, pages, layer_bytes]: what travels and is cached."""
        shape = (page_format.layers, pages, 2, page_format.page_tokens, page_format.kv_heads)
        values = self.bytes[:, :, : page_format.value_bytes].view(_TORCH_DTYPES[page_format.dtype])
        self._values: tuple[Tensor, ...] = values.view(*shape, page_format.head_dim).unbind()
        self._scales: tuple[Tensor, ...] = ()
        if page_format.scale_bytes:
            self._scales = self.bytes[:, :, page_format.value_bytes :].view(torch.float32).view(shape).unbind()

    def read_bytes(self, layers: slice, page_ids: Sequence[int]) -> memoryview:
        """Page after page, each layer after layer. A copy."""
        if self.device.type == "cpu":
            return read_rows(self.bytes.numpy(), layers, page_ids)
        chosen = self.bytes[layers].index_select(1, self.page_index(page_ids))  # [layers, pages, layer_bytes]
        return memoryview(chosen.transpose(0, 1).contiguous().cpu().numpy().data).cast("B")

    def lend_bytes(self, layer: int, page_ids: Sequence[int]) -> memoryview:
        """Of one layer, page after page, while nobody writes into them: on the CPU without a copy where they lie in one
        run."""
        if self.device.type == "cpu":
            return lend_rows(self.bytes.numpy(), layer, page_ids)
        return self.read_bytes(slice(layer, layer + 1), page_ids)

    def write_bytes(self, layers: slice, page_ids: Sequence[int], body: Buffer) -> None:
        """The reverse of `read_bytes`; the size must fit."""
        if self.device.type == "cpu":
            return write_rows(self.bytes.numpy(), layers, page_ids, body)
        # torch wants a buffer that may be written; here it is only read from
        new = torch.from_numpy(np.frombuffer(body, np.uint8).copy()).to(self.device)
        rows = new.view(len(page_ids), -1, self.format.layer_bytes).transpose(0, 1)
        self.bytes[layers][:, self.page_index(page_ids)] = rows

    def copy_below(self, layer: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Makes the `targets` what the `sources` are below this layer."""
        old, new = self.page_index(sources), self.page_index(targets)
        for at in range(layer):
            self.bytes[at][new] = self.bytes[at][old]
        for at, stream in self._streams.items():
            if at <= layer:
                stream[new] = stream[old]

    def keep_stream(self, layer: int, slots: Slots, x: Tensor) -> None:
        """The residual stream x [tokens, hidden] of these tokens as it enters the layer, where it is to be kept."""
        if layer in self._streams:
            self._streams[layer][slots.pages, slots.offsets] = x

    def stream(self, layer: int, slots: Slots) -> Tensor:
        """What was kept of these tokens, [tokens, hidden]."""
        return self._streams[layer][slots.pages, slots.offsets]

    def layer(self, layer: int) -> Tensor:
        """The layer's values themselves, [pages, 2, page_tokens, kv_heads, head_dim] of the KV dtype."""
        return self._values[layer]

    def scales(self, layer: int) -> Tensor:
        """The layer's scales themselves, [pages, 2, page_tokens, kv_heads] in fp32; int8 only."""
        return self._scales[layer]

    def page_index(self, page_ids: Sequence[int]) -> Tensor:
        """Page numbers as `gather` wants them, [pages]: made once per step, used in every layer."""
        return torch.tensor(page_ids, dtype=torch.int64, device=self.device)

    def slots(self, runs: Iterable[tuple[Sequence[int], int, int]]) -> Slots:
        """Where tokens lie, for `write`. A run is (a sequence's page ids, its first token meant, how many)."""
        size = self.format.page_tokens
        pages: list[int] = []
        offsets: list[int] = []
        for page_ids, start, length in runs:
            for token in range(start, start + length):
                pages.append(page_ids[token // size])
                offsets.append(token % size)
        return Slots(self.page_index(pages), self.page_index(offsets))

    def write(self, layer: int, slots: Slots, k: Tensor, v: Tensor) -> None:
        """Stores k and v, each [tokens, kv_heads, head_dim] in fp32, at the slots of these tokens."""
        for which, x in enumerate((k, v)):
            match self.format.dtype:
                case "fp32":
                    values = x
                case "fp16":
                    values = x.clamp(-_FP16_LARGEST, _FP16_LARGEST).to(torch.float16)
                case "int8":
                    scales = (x.abs().amax(-1) / _INT8_LARGEST).clamp_min(_SMALLEST_SCALE)  # [tokens, kv_heads]
                    values = (x / scales[..., None]).round_().to(torch.int8)
                    self._scales[layer][slots.pages, which, slots.offsets] = scales
            self._values[layer][slots.pages, which, slots.offsets] = values

    def gather(self, layer: int, page_index: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """K and V of the first `length` tokens of a sequence, each [length, kv_heads, head_dim] in fp32; copies."""
        k, v = (self._gathered(layer, which, page_index)[:length] for which in (0, 1))
        return k, v

    def _gathered(self, layer: int, which: int, page_index: Tensor) -> Tensor:
        heads, width = self.format.kv_heads, self.format.head_dim
        # [pages, page_tokens, kv_heads, head_dim] -> [pages * page_tokens, kv_heads, head_dim]
        values = self._values[layer][:, which].index_select(0, page_index).view(-1, heads, width)
        if self.format.dtype == "fp32":
            return values
        if self.format.dtype == "fp16":
            return values.float()
        scales = self._scales[layer][:, which].index_select(0, page_index).view(-1, heads, 1)
        return values.float().mul_(scales)
