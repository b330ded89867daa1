"""Readers of recorded traces, one file per format; `load` in `opening` finds the right one."""
