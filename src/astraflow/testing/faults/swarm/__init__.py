"""A swarm whose clients are killed, stopped, cut off and started again at random."""
