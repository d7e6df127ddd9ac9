"""The KV-relevant root of a layer group: a digest over exactly the weights that its keys and values depend on.

K and V of a layer are projections of the layer's normed input. The input is the embedding passed through all layers
below, whole. So the root covers the embedding, every tensor of the layers below the group's last one, and of that last
layer only the input norm, the k and v projections with their biases, and the k norm.

A version that changes other tensors only (the last layer's MLP, the LM head, …) has the same KV-relevant root: its
cached prefixes stay valid, and are still keyed by content.
"""

from __future__ import annotations

from collections.abc import Mapping

from pdbus.canonical import digest
from pdbus.kv.prefix import LayerGroup
from pdbus.messages.common import Digest
from pdbus.weights.layer import META, layer_of

_SCHEMA = "pdbus.kv.root/1"
_STREAM_SCHEMA = "pdbus.kv.stream/1"

_OUTSIDE_LAYERS = ("model.norm.", "lm_head.")
"""Read after the last layer only. A tied LM head is the embedding, and covered as such."""

_AFTER_KV = ("self_attn.q_proj.", "self_attn.q_norm.", "self_attn.o_proj.", "post_attention_layernorm.", "mlp.")
"""Within the group's last layer: read beside or after its K and V. Anything not named here counts, so that a new kind
of tensor can at worst cost a hit."""


def kv_relevant_root(tensors: Mapping[str, Digest], group: LayerGroup) -> Digest:
    """The root over the (name, digest) pairs of a version's tensors; `meta` files among them don't count.

    Settings that are no tensors (eps, RoPE, …) are part of the prefix scope instead. Raises ValueError where the
    mapping lacks the group's layers, since a root over nothing would be equal for all models."""
    prefix = f"model.layers.{group.last}."
    if not any(name.startswith(prefix) for name in tensors):
        raise ValueError(f"no tensor of layer {group.last} is among the {len(tensors)} given")
    relevant = {name: content for name, content in tensors.items() if is_kv_relevant(name, group)}
    return digest([_SCHEMA, [group.first, group.last], relevant])


def stream_root(tensors: Mapping[str, Digest], layer: int) -> Digest:
    """The root of the residual stream as it enters this layer: over the embedding and every tensor of the layers below.

    It covers their keys and values too. Raises ValueError as `kv_relevant_root`."""
    below = LayerGroup(0, layer - 1)
    kv_relevant_root(tensors, below)
    relevant = {
        name: content
        for name, content in tensors.items()
        if is_kv_relevant(name, below) or name.startswith(f"model.layers.{below.last}.")
    }
    return digest([_STREAM_SCHEMA, layer, relevant])


def is_kv_relevant(name: str, group: LayerGroup) -> bool:
    """Whether the group's KV depends on the tensor of this Hugging Face name."""
    if name.startswith(_OUTSIDE_LAYERS) or layer_of(name) == META:
        return False
    if not name.startswith("model.layers."):
        return True  # the embedding
    number, _, rest = name.removeprefix("model.layers.").partition(".")
    layer = int(number)
    return layer < group.last or (layer == group.last and not rest.startswith(_AFTER_KV))
