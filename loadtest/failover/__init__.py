"""`python -m loadtest failover`: from the death of a decode worker to the next token of its streams."""
