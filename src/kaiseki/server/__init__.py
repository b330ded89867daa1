"""The OpenAI-compatible HTTP server: from a request on the wire to the driver, and back."""
