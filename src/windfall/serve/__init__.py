"""The OpenAI API over an engine: `make_app` returns an ASGI application, `windfall serve` runs it."""
