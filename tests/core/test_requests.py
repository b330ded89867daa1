"""What a request is made of."""

from __future__ import annotations

from dataclasses import fields, replace

from kaiseki.core.requests import Begun, Request, ServiceClass


def test_only_the_digests_are_left_out() -> None:
    cls = ServiceClass("chat", ttft_ns=5)
    given = Request(
        "a", 7, 8, "t", cls, 9, 3, -1, (b"x" * 32,), "b", 11, True, Begun(1, True), "lora"
    )  # fmt: skip
    unset = [f.name for f in fields(Request) if getattr(given, f.name) == getattr(Request("a", 1, 1), f.name)]
    assert unset == ["id"], "every field has a value of its own here"
    assert given.without_digests() == replace(given, block_hashes=())


def test_its_own_target_comes_before_that_of_its_class() -> None:
    cls = ServiceClass("chat", ttft_ns=5)
    assert Request("a", 1, 1, cls=cls).ttft_target_ns == 5
    assert Request("a", 1, 1, cls=cls, ttft_ns=3).ttft_target_ns == 3
    assert Request("a", 1, 1).ttft_target_ns is None
