"""The bodies of the commands, one module each.

A module here imports only light things at its top, and what its command needs inside the function, so
that `kaiseki --help` answers at once.
"""
