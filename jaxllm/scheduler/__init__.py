"""Who runs, and how many tokens each: pure decisions, no arrays on a device, no clock of its own."""
