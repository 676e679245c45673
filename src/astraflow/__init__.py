"""AstraFlow: dataflow-oriented reinforcement learning for agentic LLMs."""

__version__ = "0.1.0"
