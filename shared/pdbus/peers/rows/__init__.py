"""Rows of sparse tables, from param-servers and from their logs: for workers, clients and any other service."""

from pdbus.peers.rows.follower import RowFollower
from pdbus.peers.rows.reader import RowReader, Rows

__all__ = ["RowFollower", "RowReader", "Rows"]
