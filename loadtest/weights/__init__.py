"""`python -m loadtest weights`: what changing the weights costs while the system serves, goal by goal."""
