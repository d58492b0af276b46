"""Measurements: latency and throughput of a model here, load on any server, start-up, and what the host costs."""
