"""Public stand-ins: an executor that follows a script, faults on demand, a tokenizer without files."""
