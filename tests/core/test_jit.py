"""Compiled code that was stored on disk is not used once anything it depends on has changed."""

from __future__ import annotations

import inspect

from kaiseki.core import jit
from kaiseki.memory import changes, prefix, queries


def test_the_stamp_covers_what_a_module_imports(monkeypatch):
    jit._stamp.cache_clear()
    before = {module: jit._stamp(module.__name__) for module in (changes, queries)}
    source = inspect.getsource
    monkeypatch.setattr(inspect, "getsource", lambda module: source(module) + "#" * (module is prefix))
    assert all(jit._stamp(module.__name__) == stamp for module, stamp in before.items()), "computed once"
    jit._stamp.cache_clear()
    assert all(jit._stamp(module.__name__) != stamp for module, stamp in before.items())
    jit._stamp.cache_clear()


def test_compiled_functions_carry_the_stamp():
    stored = getattr(changes.reserve, "_cache", None)
    if stored is not None:  # compiled at all
        assert stored._cache_file._source_stamp == jit._stamp(changes.__name__)
