"""The wire format: requests, checked and documented, and the shapes of answers; OpenAI's, and vLLM's extras."""
