"""`python -m loadtest consistency`: no answer, cache or hand-over mixes two versions, whatever breaks."""
