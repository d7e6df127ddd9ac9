"""`python -m loadtest router`: what routers and bus cost by themselves, with workers that answer at once."""
