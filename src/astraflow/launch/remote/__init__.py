"""Play from anywhere what a node's swarm door hands out: workflows in worker processes, without torch."""
