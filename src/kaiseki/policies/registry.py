"""Finding policies by name: built-in, installed by others, or `package.module:Policy`."""

from __future__ import annotations

from dataclasses import fields
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from kaiseki.core.policy import Policy

GROUP = "kaiseki.policies"
"""Entry points of other packages; a built-in name is never theirs."""
BUILT_IN = {
    "static": "StaticBatch",
    "fcfs": "Fcfs",
    "priority": "Priority",
    "sarathi": "Sarathi",
    "edf": "Edf",
    "orca": "Orca",
    "lpm": "Lpm",
    "srpt": "Srpt",
    "vtc": "Vtc",
    "urgency-match": "UrgencyMatch",
    "kaiseki": "Kaiseki",
}
"""Class by name; each is in the module of that name, with an underscore for a hyphen."""


class UnknownPolicy(ValueError):
    """No policy by that name; the message lists those there are."""


def names() -> list[str]:
    """Names of all policies, built-in and installed, sorted."""
    return sorted({*BUILT_IN, *(point.name for point in entry_points(group=GROUP))})


def load(name: str, **settings: Any) -> Policy:
    """A policy by name or `package.module:Class`, with settings given as keyword arguments.

    Raises:
        UnknownPolicy: there is none of that name, or what is there is not a policy.
        ValueError: a setting that the policy does not have.
    """
    cls = _find(name)
    known = {f.name for f in fields(cls)}
    for key, value in settings.items():
        if key not in known:
            raise ValueError(
                f"policy {name!r} has no setting {key!r} (given {value!r}); it has {sorted(known)}"
            )
    return cls(**settings)


def _find(name: str) -> type[Policy]:
    found: object
    if name in BUILT_IN:
        found = getattr(import_module(f"kaiseki.policies.{name.replace('-', '_')}"), BUILT_IN[name])
    elif ":" in name:
        module, _, attribute = name.partition(":")
        try:
            found = getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise UnknownPolicy(f"policy {name!r}: {error}") from error
    else:
        point = next((p for p in entry_points(group=GROUP) if p.name == name), None)
        if point is None:
            raise UnknownPolicy(f"policy {name!r} is not installed; there are {names()}")
        found = point.load()
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise UnknownPolicy(f"policy {name!r} is not a subclass of kaiseki.core.policy.Policy")
    return found
