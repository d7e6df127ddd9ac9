"""`python -m loadtest interference`: steady streams while long prompts arrive, disaggregated against colocated."""
