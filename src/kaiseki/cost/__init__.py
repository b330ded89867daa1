"""Cost models: how long a set of chunks takes."""
