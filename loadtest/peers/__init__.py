"""Other engines beside ours: each behind one small interface, in a process of its own, on the same weights."""
