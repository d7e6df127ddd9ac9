"""`python -m loadtest quality`: what each precision of weights and KV costs in quality."""
