"""Scheduling policies: frozen settings plus pure functions over arrays, one file each."""
