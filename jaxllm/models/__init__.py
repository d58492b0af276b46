"""Model families: what a checkpoint's tensors mean and how a step runs through them."""
