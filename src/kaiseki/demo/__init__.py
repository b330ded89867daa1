"""The demonstration: one real load under several policies, on this machine, compared and explained."""
