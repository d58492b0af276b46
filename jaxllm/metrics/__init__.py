"""What the engine counts, and how Prometheus reads it. No module globals: one registry per engine."""
