"""The cluster file: which model runs on which cards, in how many replicas, and what joins them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, ValidationError

from kaiseki.core.protocols import CostModel
from kaiseki.cost.calibrated import Profile
from kaiseki.cost.capacity import DoesNotFit, kv_blocks
from kaiseki.cost.cards import load_card
from kaiseki.cost.catalogue import UnknownName
from kaiseki.cost.deployment import Deployment, HostTime
from kaiseki.cost.hf_config import load_model
from kaiseki.cost.online import OnlineLinear
from kaiseki.cost.profiled import Profiled
from kaiseki.cost.roofline import Roofline
from kaiseki.sections import (
    ConfigError,
    Name,
    Positive,
    Problem,
    Section,
    Shipped,
    keys,
    problem_of,
    read_mapping,
)

SHIPPED = Shipped(resources.files("kaiseki.sim") / "clusters")
Count = Annotated[int, Field(ge=1, le=100_000)]
Limit = Annotated[int, Field(ge=0)]
BLOCK_TOKENS = 16


class Pool(Section):
    """Replicas that are alike: each takes whole requests, only their prompts, or all but these."""

    name: Name
    role: Literal["mixed", "prefill", "decode"] = "mixed"
    card: str
    cards: Count | None = None
    tp: Count = 1
    pp: Count = 1
    replicas: Count | None = None
    host_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    block_tokens: Count = BLOCK_TOKENS
    kv_blocks: Count | None = None
    max_batch_size: Count = 256
    max_step_tokens: Count = 8192
    max_waiting: Limit = 0
    max_waiting_tokens: Limit = 0
    profile: Annotated[str | None, Field(min_length=1)] = None


class Links(Section):
    """What joins each prefill pool with each decode pool: one link, of the same kind everywhere.

    Attributes:
        gb_s: bandwidth, GB/s (1e9 bytes), that transfers under way share evenly.
        latency_us: from the last byte sent to its arrival.
        max_active: most transfers under way at once on a link.
        feedback_us: how long it takes until the scheduler knows that a transfer has been sent.
        headroom: the part of the bandwidth that the scheduler leaves free.
    """

    gb_s: Positive
    latency_us: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    max_active: Count = 4
    feedback_us: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    headroom: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.0


class Routers(Section):
    """What stands before the replicas: so many routers, each of which gets its part of the requests.

    Attributes:
        count: how many.
        refresh_ms: how often replicas say how loaded they are; 0 if routers always know.
    """

    count: Count = 1
    refresh_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0


class Cluster(Section):
    """A cluster file."""

    model: str
    pools: Annotated[list[Pool], Field(min_length=1)]
    links: Links | None = None
    routers: Routers = Routers()


class Replica:
    """What the fleet is made of: a deployment, with room for KV.

    Attributes:
        pool: whose replica it is.
        deployment: model, card and split.
        profile: measured step times, in place of the deployment's roofline.
        timing: how long its steps take.
        blocks: KV blocks of its pool.

    Raises:
        DoesNotFit: the model leaves no room for KV.
        ValueError: there is a profile, and several stages.
    """

    def __init__(self, pool: Pool, deployment: Deployment, profile: Profile | None = None) -> None:
        self.pool = pool
        self.deployment = deployment
        self.profile = profile
        self.timing = Roofline(deployment) if profile is None else Profiled(deployment, profile)
        self.blocks = pool.kv_blocks or kv_blocks(
            deployment, pool.block_tokens, pool.max_step_tokens, pool.max_batch_size
        )

    def cost_model(self) -> CostModel:
        """What the scheduler believes of step times: all of the roofline, or what it learns as it goes."""
        return self.timing if self.profile is None else OnlineLinear(np.array(self.profile.linear))


def shipped() -> list[str]:
    """Names of the files that come with Kaiseki."""
    return SHIPPED.names()


def load(path_or_name: str | Path) -> Cluster:
    """Read a cluster file, or one that comes with Kaiseki by its name.

    Raises:
        OSError: it can't be read.
        ConfigError: it has problems.
    """
    return parse(SHIPPED.read(path_or_name))


def parse(text: str | bytes) -> Cluster:
    """A cluster file from YAML text.

    Raises:
        ConfigError: with every problem found.
    """
    raw, problems = read_mapping(Cluster, text)
    cluster = None
    try:
        cluster = Cluster.model_validate(raw)
    except ValidationError as error:
        problems += [problem_of(Cluster, item) for item in error.errors(include_url=False)]
    if cluster is not None:
        problems += _parts_missing(cluster)
    if problems or cluster is None:
        raise ConfigError(problems)
    return cluster


def _parts_missing(cluster: Cluster) -> Iterator[Problem]:
    """Roles that need one another, pools that can't be told apart, links that join nothing."""
    names = [pool.name for pool in cluster.pools]
    for i, name in enumerate(names):
        if name in names[:i]:
            yield Problem(f"pools[{i}].name", name, "another pool has this name; each must have its own")
    roles = {pool.role for pool in cluster.pools}
    for one, other in (("prefill", "decode"), ("decode", "prefill")):
        if one in roles and other not in roles:
            text = f"{one} pools need a pool with role: {other} beside them"
            yield Problem("pools", ", ".join(sorted(roles)), text)
    if {"prefill", "decode"} <= roles and cluster.links is None:
        text = f"prefill and decode pools need links: a mapping with {', '.join(keys(Links))}"
        yield Problem("links", None, text)
    if not {"prefill", "decode"} <= roles and cluster.links is not None:
        yield Problem("links", cluster.links.gb_s, "only prefill and decode pools are joined by links")


def fleet(cluster: Cluster) -> list[Replica]:
    """The replicas of all pools, in order.

    Raises:
        ConfigError: a card or model is unknown, cards don't make up whole replicas, the model does not fit.
    """
    problems: list[Problem] = []
    replicas: list[Replica] = []
    for i, pool in enumerate(cluster.pools):
        try:
            replicas += _replicas(cluster.model, pool)
        except ConfigError as error:
            problems += [Problem(f"pools[{i}].{p.path}", p.value, p.message) for p in error.problems]
    if problems:
        raise ConfigError(problems)
    return replicas


def _replicas(model: str, pool: Pool) -> Iterator[Replica]:
    each = pool.tp * pool.pp
    count = pool.replicas or max((pool.cards or each) // each, 1)
    if pool.cards is not None and pool.cards != count * each:
        text = f"must be replicas x tp x pp = {count} x {pool.tp} x {pool.pp}"
        raise ConfigError([Problem("cards", pool.cards, text)])
    try:
        card = load_card(pool.card)
    except UnknownName as error:
        raise ConfigError([Problem("card", pool.card, str(error))]) from None
    try:
        shape = load_model(model)
    except (UnknownName, OSError, ValueError) as error:
        raise ConfigError([Problem("model", model, str(error))]) from None
    profile = _profile(pool)
    try:
        host = HostTime(base_us=pool.host_ms * 1e3)
        replica = Replica(pool, Deployment(shape, card, pool.tp, pool.pp, host), profile)
    except DoesNotFit as error:
        raise ConfigError([Problem("card", pool.card, str(error))]) from None
    except ValueError as error:
        raise ConfigError([Problem("tp", pool.tp, str(error))]) from None
    return (replica for _ in range(count))


def _profile(pool: Pool) -> Profile | None:
    if pool.profile is None:
        return None
    wrong = ""
    if pool.pp > 1:
        wrong = f"is of one pass through the model, so pp must be 1, not {pool.pp}"
    if pool.host_ms:
        wrong = "has the host's time in it, so host_ms must be left out"
    if wrong:
        raise ConfigError([Problem("profile", pool.profile, wrong)])
    try:
        return Profile.load(Path(pool.profile))
    except OSError as error:
        text = f"{error.strerror}; `kaiseki calibrate` writes one"
        raise ConfigError([Problem("profile", pool.profile, text)]) from None
    except ValueError as error:
        raise ConfigError([Problem("profile", pool.profile, str(error))]) from None
