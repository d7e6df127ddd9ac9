"""`python -m loadtest invariance`: whether a request's logits depend on anything but the request, to the bit (G9)."""
