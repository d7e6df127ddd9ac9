"""What prefill and decode workers share: scheduler, step loop, loaded versions, and the bookkeeping of attempts."""
