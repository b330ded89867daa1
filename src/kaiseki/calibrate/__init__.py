"""How long steps take: measured here, read from another engine's benchmark, or from published tables."""
