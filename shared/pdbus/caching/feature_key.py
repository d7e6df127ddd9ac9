"""The keys of features: vectors and the like, one for an item. Pure.

An embedding is keyed by all that its numbers depend on, so that it can't be wrong, only not be there. A feature of a
caller's own service is a *named* entry: its key says whose and which, and the entry says of which version it is.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from pdbus import canonical
from pdbus.messages.common import Digest

SCHEMA_VERSION = 1
"""Raised whenever the meaning of a key or the form of an entry changes."""


@dataclass(frozen=True, slots=True)
class FeatureKey:
    key: Digest
    """Digest of `material`, under the tenant's salt where it has a tenant: the entry's address."""
    material: bytes
    """Stored in the entry and compared on a hit."""
    name: str = ""
    """Of a named entry."""


def embedding_key(*, tenant: str, salt: bytes, root: Digest, compute_class: str, ids: Sequence[int]) -> FeatureKey:
    """Of the vector that a text's token ids give. Tenants are apart: nobody learns what another one has asked."""
    packed = struct.pack(f">{len(ids)}I", *ids)
    material = canonical.encode(["pdbus feature", SCHEMA_VERSION, root, compute_class, "embedding", tenant, packed])
    return FeatureKey(canonical.salted_digest(salt, material), material)


def named_key(*, model: str, subject: str, item: str) -> FeatureKey:
    """Of what the service at `subject` says of an item, in whichever version."""
    material = canonical.encode(["pdbus named feature", SCHEMA_VERSION, model, subject, item])
    return FeatureKey(canonical.content_digest(material), material, feature_name(model, item))


def feature_name(model: str, item: str) -> str:
    """The name by which whoever changes an item has it deleted everywhere."""
    return f"feature-{canonical.digest([model, item]).hex()}"


def source_root(model: str, subject: str) -> Digest:
    """Stands for a root in the entries of a service, which has none: no such root is ever deleted."""
    return canonical.digest(["pdbus feature source", model, subject])
