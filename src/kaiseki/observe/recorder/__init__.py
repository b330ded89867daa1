"""The flight recorder: what a scheduler decided and why, in a file that survives the process.

`layout` is the format, `ring` writes it, `reading` reads it, `flight` is what schedulers are given, `past`
turns a recording into the history that `explain` reads.
"""
