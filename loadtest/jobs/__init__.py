"""What durable jobs cost beside the work itself."""
