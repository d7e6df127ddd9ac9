"""Row updates of a sparse table at a steady rate: how many a second, and how soon another process sees them."""

from loadtest.weights_rows.measure import RowsReport, measure

__all__ = ["RowsReport", "measure"]
