"""The swarm door of a node: clients anywhere play its episodes, over HTTP that they open."""
