"""Inference over NATS from Python: `async with connect(url, model) as client: await client.chat([...])`."""

from pdbus.client.client import Client, connect
from pdbus.client.embeddings import Embeddings

__all__ = ["Client", "Embeddings", "connect"]
