"""Proof that nothing mixes two versions: a model that tells versions, a history, faults, and a run of all."""
