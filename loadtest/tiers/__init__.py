"""`python -m loadtest tiers`: what a warm prefix saves by the tier that has it, and how often which one has."""
