"""Garbage of every kind, at length: nothing crashes, hangs or grows, and good requests are answered at the end."""
