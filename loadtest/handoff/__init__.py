"""`python -m loadtest handoff`: what the hand-over of KV from prefill to decode costs, in time and bytes."""
