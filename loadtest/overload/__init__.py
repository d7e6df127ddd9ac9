"""More than a stack can do, and one tenant's flood beside another's few streams."""
