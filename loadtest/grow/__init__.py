"""`python -m loadtest grow`: how cost grows with length, batch, context, workers and routers, as plots and numbers."""
