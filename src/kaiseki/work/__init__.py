"""Where load comes from: recorded traces, generators with their statistics, and who sends what.

Everything here is a stream of `Batch`es in order of arrival, so that ten million requests take the
memory of one batch. The simulator reads it; nothing here knows an engine or a scheduler.
"""
