"""The worker process: plays episodes away from the node's engine and control loops. Never imports torch."""
