"""Reading the descriptions of cards and models that ship with the package."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, cast

import yaml


class UnknownName(ValueError):
    """No description of that name ships with the package; the message lists those that do."""


def names(kind: str) -> tuple[str, ...]:
    """Names of the descriptions of a kind (`cards` or `models`), sorted."""
    return tuple(sorted(file.name.removesuffix(".yaml") for file in _folder(kind).iterdir()))


@cache
def described(kind: str, name: str) -> dict[str, Any]:
    """A description as plain values, with `sources` telling where each figure comes from.

    In the file a figure is written as `[value, source]`, where `source` is a key of the file's own
    `sources` table. Here `sources` maps the figure's dotted path to the text of its source.

    Raises:
        UnknownName: there is no such description.
        ValueError: a figure has no source, or one that the table lacks.
    """
    if name not in names(kind):
        raise UnknownName(f"{name!r} is none of the {kind} known here: {', '.join(names(kind))}")
    tree = yaml.safe_load((_folder(kind) / f"{name}.yaml").read_text("utf-8"))
    texts = cast(dict[str, str], tree.pop("sources"))
    cited: dict[str, str] = {}
    values = cast(dict[str, Any], _plain(tree, texts, cited, ""))
    return {**values, "id": name, "sources": cited}


def _folder(kind: str) -> Traversable:
    return files("kaiseki.cost") / "data" / kind


def _plain(node: object, texts: dict[str, str], cited: dict[str, str], path: str) -> object:
    """The node without its sources, which are added to `cited`."""
    if isinstance(node, dict):
        inner = f"{path}." if path else ""
        return {key: _plain(value, texts, cited, f"{inner}{key}") for key, value in node.items()}
    if isinstance(node, list) and len(node) == 2 and node[1] in texts:
        cited[path] = texts[node[1]]
        return cast(object, node[0])
    if isinstance(node, str):
        return node
    raise ValueError(f"{path}: {node!r} should be [value, source], the source one of {', '.join(texts)}")
