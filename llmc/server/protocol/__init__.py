"""What goes over the wire: requests, checked and documented, and the shapes of answers; OpenAI's, and vLLM's extras."""
