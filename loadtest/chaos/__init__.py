"""`python -m loadtest chaos`: a stack of real processes under mixed load, while one after another is struck."""
