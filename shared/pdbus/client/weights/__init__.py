"""Weights that change while they are served: updates, refs and lineage of one model, from Python."""

from pdbus.client.weights.row_watch import RowBatch
from pdbus.client.weights.row_writer import Accepted
from pdbus.client.weights.table import RowTable
from pdbus.client.weights.update import Committed, Update
from pdbus.client.weights.weights import Weights

__all__ = ["Accepted", "Committed", "RowBatch", "RowTable", "Update", "Weights"]
