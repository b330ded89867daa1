"""From symptoms to causes: reads a server's metrics and state and says what is wrong, why, and what to do."""
