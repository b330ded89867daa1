"""Rules that are broken on purpose (`python -m tests.mutants`) still stand where the list says."""

from __future__ import annotations

from pathlib import Path

from tests.mutants.catalogue import MUTANTS

import kaiseki


def test_each_mutant_has_its_one_place_in_the_source() -> None:
    source = Path(kaiseki.__file__).parent
    found = {m.name: (source / m.path).read_text(encoding="utf-8").count(m.old) for m in MUTANTS}
    assert {name: count for name, count in found.items() if count != 1} == {}
