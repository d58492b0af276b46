"""The Executor on the device: steps, decided above, become two compiled programs over donated pages."""
