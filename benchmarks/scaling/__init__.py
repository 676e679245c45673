"""The parts of `bench_scaling`: real runs that check the simulator, sweeps by it, latency, sizes of models."""
