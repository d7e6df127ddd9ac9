"""`python -m loadtest engine`: our engine, our whole stack and other engines side by side."""
