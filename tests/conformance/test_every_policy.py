"""What every policy must keep at every pipeline depth, under random workloads in tiny pools."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from tests.conformance.workloads import Workload, workloads
from tests.harness import BUILT_IN

PIPELINES = ((0, True), (1, True), (3, False))


@pytest.mark.parametrize(("depth", "placeholders"), PIPELINES, ids=("depth0", "depth1", "depth3"))
@pytest.mark.parametrize("policy", BUILT_IN)
@given(work=workloads())
@settings(max_examples=40)
def test_every_request_ends_once_with_its_own_output(
    policy: str, depth: int, placeholders: bool, work: Workload
) -> None:
    bench = work.bench(policy, depth, placeholders)
    bench.run(work.jobs)
    bench.check_end()
