"""From a checkpoint's own description (config.json or GGUF metadata) to a `ModelConfig`: one file a family."""
