"""`kaiseki replay`: what was decided, decided again; and what another policy or setting would have done."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kaiseki.commands.common import FINDING, STDOUT, JsonFile, fail, write_json

if TYPE_CHECKING:
    from kaiseki.core.policy import Policy
    from kaiseki.core.settings import SchedulerSettings
    from kaiseki.observe.recorder.reading import Recording
    from kaiseki.sim.whatif import Recorded

MOST_SHOWN = 10


def replay(
    recording: Annotated[
        Path, typer.Argument(metavar="RECORDING", help="Folder or file of a recording.", show_default=False)
    ],
    policy: Annotated[
        list[str] | None, typer.Option(help="Another policy; may be repeated.", show_default=False)
    ] = None,
    changed: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Another setting; may be repeated.", show_default=False
        ),
    ] = None,
    json: JsonFile = None,
) -> None:
    """Make the recorded decisions again: they must come out the same, or the recording is not to be trusted.

    With --policy or --set, tell how its requests would have fared instead, on an engine that is simulated
    with the recorded step times. Settings are those of the scheduler (max_batch_size, watermark_ratio, …) and
    of the policy (tau_ms, budget_tokens, …).

    Example: kaiseki replay /var/lib/kaiseki --policy fcfs --set max_batch_size=64
    """
    from rich.console import Console

    from kaiseki.sim.comparison import compare

    recorded = _replayed(_read(recording))
    document = compare(recorded, _cases(recorded, policy or [], changed or []))
    console = Console(stderr=json == STDOUT)
    for line in _lines(document):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if json is not None:
        write_json(document, json)
    if document["mismatches"]:
        raise typer.Exit(FINDING)


def _read(path: Path) -> Recording:
    from kaiseki.observe.recorder.reading import UnreadableRecording, read

    try:
        return read(path)[0]
    except UnreadableRecording as error:
        fail(str(error))
    except OSError as error:
        fail(f"{path}: {error.strerror}")


def _replayed(recording: Recording) -> Recorded:
    from kaiseki.observe.recorder.replay import NotReplayable
    from kaiseki.observe.recorder.state import UnreadableState
    from kaiseki.sim.whatif import Recorded

    try:
        return Recorded(recording)
    except (NotReplayable, UnreadableState) as error:
        fail(str(error))


def _cases(
    recorded: Recorded, names: list[str], changes: list[str]
) -> dict[str, tuple[Policy, SchedulerSettings]]:
    """What is to be tried, by the name under which it is told."""
    from kaiseki.policies.registry import UnknownPolicy, load

    policies = {}
    for name in names:
        try:
            policies[name] = load(name)
        except UnknownPolicy as error:
            fail(f"--policy: {error}")
    if changes and not policies:
        policies[recorded.policy.name] = recorded.policy
    made = {name: (policy, recorded.settings) for name, policy in policies.items()}
    for change in changes:
        made = {name: _changed(policy, settings, change) for name, (policy, settings) in made.items()}
    return made


def _changed(policy: Policy, settings: SchedulerSettings, change: str) -> tuple[Policy, SchedulerSettings]:
    key, equals, text = change.partition("=")
    if not equals:
        fail(f"--set {change!r}: must be KEY=VALUE")
    for owner in (settings, policy):
        if key in {f.name for f in fields(owner)}:
            value = _value(change, text, getattr(owner, key))
            if owner is settings:
                return policy, replace(settings, **{key: value})
            return replace(policy, **{key: value}), settings
    known = sorted(f.name for owner in (settings, policy) for f in fields(owner))
    return fail(f"--set {change}: there is no setting {key!r}; there are {', '.join(known)}")


def _value(change: str, text: str, now: Any) -> Any:
    """A setting's value from text, of the kind that it has now; a number where it has none."""
    try:
        if isinstance(now, bool):
            return {"true": True, "false": False}[text.lower()]
        return int(text) if isinstance(now, int) else float(text) if "." in text else int(text)
    except (ValueError, KeyError):
        kind = "true or false" if isinstance(now, bool) else "a number"
        fail(f"--set {change}: must be {kind}; it is {now} now")


def _lines(document: dict[str, Any]) -> list[str]:
    """For people."""
    found = document["mismatches"]
    told = f"{document['decisions']} decisions of slots {document['first_slot']} to {document['last_slot']}: "
    told += (
        "all the same again" if not found else f"slot {found[0]['slot']} differs in its {found[0]['array']}"
    )
    lines = [told]
    for name, figures in document["policies"].items():
        rate, ttft = figures["attainment"], figures["ttft_ms"]
        shown = "nothing ended" if rate is None else f"{rate:.1%} of {figures['requests']} attained"
        if ttft is not None:
            shown += f", first token after {ttft['p50']:.0f} ms (median), {ttft['p99']:.0f} ms (99 %)"
        lines.append(f"{name}: {shown}")
    changes = document["changes"]
    for change in changes[:MOST_SHOWN]:
        before, after = change["before"], change["after"]
        lines.append(f"  {change['request']} under {change['policy']}: {_fate(before)}, then {_fate(after)}")
    if len(changes) > MOST_SHOWN:
        lines.append(f"  and {len(changes) - MOST_SHOWN} more (--json)")
    return lines


def _fate(fate: dict[str, Any]) -> str:
    text = f"{fate['outcome']} {'in time' if fate['attained'] else 'late'}"
    return text if fate["ttft_ms"] is None else f"{text} (first token {fate['ttft_ms']:.0f} ms)"
