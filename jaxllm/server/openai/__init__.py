"""Routes that speak OpenAI's API."""
