"""What our YAML files have in common: sections without unknown keys, service classes, errors that help.

Settings, classes and whatever else is written by hand go through these, so that a mistake in any of
them is told in the same way: the path, the value found, and what is allowed instead.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from kaiseki.core.requests import OnLate, ServiceClass

TIER_STEP = 100
"""How far apart the tiers of two classes are in `Request.priority` units, see `kaiseki.server.slo`."""

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[\w.\-]+$")]


class Section(BaseModel):
    """A mapping of the file: unknown keys are errors, values are not converted between types."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, populate_by_name=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _nothing_said(cls, value: Any) -> Any:
        """A key with nothing after it (`scheduling:`) is an empty section."""
        return {} if value is None else value


class Class(Section):
    """A service class; targets left out don't apply."""

    ttft_ms: Positive | None = None
    tbt_ms: Positive | None = None
    deadline_s: Positive | None = None
    weight: Positive = 1.0
    on_late: Literal["keep", "demote", "expire"] = "demote"
    tier: Annotated[int, Field(ge=-1000, le=1000)] = 0

    def service_class(self, name: str) -> ServiceClass:
        """The class as the core knows it."""
        return ServiceClass(
            name=name,
            ttft_ns=_ns(self.ttft_ms, 1e6),
            tbt_ns=_ns(self.tbt_ms, 1e6),
            deadline_ns=_ns(self.deadline_s, 1e9),
            weight=self.weight,
            on_late=OnLate[self.on_late.upper()],
            tier=self.tier * TIER_STEP,
        )


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a file: where, what was found, and what is allowed."""

    path: str
    value: Any
    message: str

    def __str__(self) -> str:
        where = f"{self.path}: " if self.path else ""
        found = "" if self.value is None else f" (found: {self.value!r})"
        return f"{where}{self.message}{found}"


class ConfigError(ValueError):
    """A file with problems."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


def read_yaml(text: str | bytes) -> tuple[Any, list[Problem]]:
    """The document of a YAML text, and keys given twice, of which plain YAML silently keeps the last."""
    try:
        loader = yaml.SafeLoader(text)
        loader.name = "the file"
        try:
            node = loader.get_single_node()
            if node is None:
                return {}, []
            twice = list(_duplicates(node, "", set()))  # first, since constructing merges `<<` into the nodes
            return loader.construct_document(node), twice
        finally:
            loader.dispose()
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError([Problem("", None, f"not valid YAML: {error}")]) from None


def read_mapping(model: type[BaseModel], text: str | bytes) -> tuple[dict[str, Any], list[Problem]]:
    """As `read_yaml`, for a file that must be a mapping with the keys of `model`.

    Raises:
        ConfigError: it is no YAML, or something else.
    """
    raw, problems = read_yaml(text)
    if not isinstance(raw, dict):
        raise ConfigError([Problem("", shown("", raw), f"must be a mapping with {', '.join(keys(model))}")])
    return raw, problems


def line_of(text: str | bytes, path: str) -> int:
    """The line, from 1, of what a path such as `pools[0].card` names in a YAML text, or of what it is in."""
    node, line = yaml.compose(text, yaml.SafeLoader), 1
    for part in re.findall(r"[^.\[\]]+", path):
        if isinstance(node, yaml.MappingNode):
            found = next(((k, v) for k, v in node.value if k.value == part), None)
            if found is None:
                break
            line, node = found[0].start_mark.line + 1, found[1]
        elif isinstance(node, yaml.SequenceNode) and part.isdecimal() and int(part) < len(node.value):
            node = node.value[int(part)]
            line = node.start_mark.line + 1
        else:
            break
    return line


class Shipped:
    """YAML files that come with a package, by their names; others by their paths."""

    def __init__(self, folder: Traversable) -> None:
        self._folder = folder

    def names(self) -> list[str]:
        """Names of the files that come along, sorted."""
        found = (entry.name for entry in self._folder.iterdir())
        return sorted(name.removesuffix(".yaml") for name in found if name.endswith(".yaml"))

    def read(self, path_or_name: str | Path) -> bytes:
        """The file of this name, else at this path.

        Raises:
            OSError: it can't be read.
        """
        name = str(path_or_name)
        if name in self.names():
            return (self._folder / f"{name}.yaml").read_bytes()
        return Path(path_or_name).read_bytes()


def _duplicates(node: yaml.Node, path: str, seen: set[int]) -> Iterator[Problem]:
    if not isinstance(node, yaml.MappingNode) or id(node) in seen:
        return
    seen.add(id(node))
    lines: dict[str, int] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        below = f"{path}.{key.value}".lstrip(".")
        line = key.start_mark.line + 1
        if key.value in lines and key.tag != "tag:yaml.org,2002:merge":
            yield Problem(below, None, f"given twice, in line {lines[key.value]} and line {line}")
        lines[key.value] = line
        yield from _duplicates(value, below, seen)


def mapping(raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The mapping under a key of a raw document; empty where there is none."""
    value = raw.get(key)
    return value if isinstance(value, dict) else {}


def problem_of(model: type[BaseModel], error: Any) -> Problem:
    """An error of pydantic about a document that should be a `model`, in our words."""
    loc = [part for part in error["loc"] if part != "[key]"]
    path = path_of(error)
    value = shown(path, error["input"])
    if error["type"] == "extra_forbidden":
        return Problem(path, value, f"unknown key; {instead(str(loc[-1]), keys_at(model, loc[:-1]))}")
    if error["type"] == "string_pattern_mismatch":
        return Problem(path, value, "only letters, digits, '_', '-' and '.' are allowed")
    if error["type"] in ("model_type", "model_attributes_type"):
        return Problem(path, value, f"must be a mapping with {', '.join(keys_at(model, loc))}")
    message = error["msg"][0].lower() + error["msg"][1:]
    return Problem(path, value, message.replace("input should", "should"))


def path_of(error: Any) -> str:
    """Where in the document an error of pydantic is: `tenants.acme.classes[0]`."""
    is_key = "[key]" in error["loc"]
    loc = [str(part) if is_key else part for part in error["loc"] if part != "[key]"]
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")


def keys_at(model: type[BaseModel], loc: list[str | int]) -> list[str]:
    """The keys allowed in the section at `loc` of a document that should be a `model`."""
    kind: Any = model
    for part in loc:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            kind = _field_type(kind, str(part))
        elif get_origin(kind) in (dict, list):
            kind = get_args(kind)[-1]
    return keys(kind) if isinstance(kind, type) and issubclass(kind, BaseModel) else []


def _field_type(model: type[BaseModel], key: str) -> Any:
    for name, field in model.model_fields.items():
        if key in (name, field.alias):
            return _said(field.annotation)
    return None


def _said(annotation: Any) -> Any:
    """What a key that may be left out holds when it is there."""
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
    if get_origin(annotation) in (Union, UnionType) and len(kinds) == 1:
        annotation = kinds[0]
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def keys(model: type[BaseModel]) -> list[str]:
    """The keys of a section as they are written in a file."""
    return [field.alias or name for name, field in model.model_fields.items()]


def instead(wrong: str, allowed: Collection[str]) -> str:
    """What could have been meant by a wrong name, and all that may be said."""
    close = difflib.get_close_matches(wrong, allowed, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}allowed: {', '.join(sorted(allowed))}"


def shown(path: str, value: Any) -> Any:
    """The value as it may be shown: short, plain, and never something that could be a key."""
    if "api_key" in path:
        return None
    return value if value is None or isinstance(value, bool | int | float) else str(value)[:200]


def _ns(value: float | None, unit: float) -> int | None:
    return None if value is None else round(value * unit)
