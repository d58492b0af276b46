"""The HTTP face: Starlette on uvicorn, OpenAI's wire format, msgspec for every schema."""
