"""The wire format: validated and documented requests, and response schemas, of OpenAI with vLLM's extensions."""
