"""What can be seen from outside: metrics, explanations."""
