"""Weights that change while they are served: updates, refs and lineage of one model, from Python."""

from pdbus.client.weights.branch import Branch, Seal
from pdbus.client.weights.lineage import Lineage
from pdbus.client.weights.row_watch import RowBatch
from pdbus.client.weights.row_writer import Accepted
from pdbus.client.weights.table import RowTable
from pdbus.client.weights.terms import Committed
from pdbus.client.weights.update import Update
from pdbus.client.weights.weights import Weights

__all__ = ["Accepted", "Branch", "Committed", "Lineage", "RowBatch", "RowTable", "Seal", "Update", "Weights"]
