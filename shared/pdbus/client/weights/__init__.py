"""Weights that change while they are served: updates, refs and lineage of one model, from Python."""

from pdbus.client.weights.update import Committed, Update
from pdbus.client.weights.weights import Weights

__all__ = ["Committed", "Update", "Weights"]
