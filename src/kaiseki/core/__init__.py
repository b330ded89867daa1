"""The scheduling core: pure decisions over arrays.

Nothing below this package reads a clock, does I/O, starts a thread or imports an engine; `now`
is always an argument, in integer nanoseconds.
"""
