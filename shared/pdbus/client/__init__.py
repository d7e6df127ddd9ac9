"""Inference over NATS from Python: `async with connect(url, model) as client: await client.chat([...])`."""

from pdbus.client.client import Client, connect

__all__ = ["Client", "connect"]
