"""What runs inside vLLM's own process: the only code that imports vLLM."""
