"""All rules on one server or several of a kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kaiseki.observe.doctor import settings_rules, symptoms
from kaiseki.observe.doctor.case import Case, Finding
from kaiseki.observe.doctor.symptoms import RUNNING, WAITING


def diagnose(cases: Mapping[str, Case]) -> list[tuple[str, Finding]]:
    """What is wrong with each server, by its address.

    What is only told from comparing servers is found once, on the first.
    """
    loads = {name: _load(case) for name, case in cases.items()}
    found = []
    for i, (name, case) in enumerate(cases.items()):
        full = replace(case, loads=loads if i == 0 else {})
        for rule in (*symptoms.RULES, *settings_rules.RULES):
            finding = rule(full)
            if finding is not None:
                found.append((name, finding))
    return found


def _load(case: Case) -> float:
    return (case.readings.gauge(RUNNING) or 0.0) + (case.readings.gauge(WAITING) or 0.0)
