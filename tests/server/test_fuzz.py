"""What schemathesis makes up from the server's own OpenAPI: no 500, and nothing that is not documented."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import CHECKS, load_all_checks
from tests.server.fakes import FakeDriver, FakeModel
from tests.server.served import GENEROUS_S, Served, serving, until

from kaiseki.config import Settings
from kaiseki.server.app import create_app

# A short context, since a request that does not say how much it wants gets all there is.
CONFIG = """
engine: {{model: {folder}, threads: 1, own_process: false, max_context: 64}}
memory: {{pool_tokens: 3000, block_size: 8}}
classes: {{hurried: {{ttft_ms: 0.001, on_late: expire}}, slow: {{deadline_s: 600}}}}
server: {{max_body_bytes: 100000}}
"""
EXAMPLES = 40
load_all_checks()
KEPT = CHECKS.get_by_names(
    ["status_code_conformance", "content_type_conformance", "response_schema_conformance"]
)


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with serving(CONFIG.format(folder=folder)) as served:
        yield served
        until(served.idle)
        assert served.get("/health").status_code == 200
        assert served.stack.driver.backlog() == (0, 0)


def document() -> dict[str, Any]:
    """The OpenAPI document; no server needs to run for that."""
    driver = FakeDriver()
    return create_app(driver, FakeModel(), Settings(), driver.backlog).openapi()


schema = schemathesis.openapi.from_dict(document())


@schema.parametrize()
@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
def test_no_answer_is_a_500_or_undocumented(case: Any, served: Served) -> None:
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body["model"] = "tiny"  # or nearly all would get a 404 and no further
        if case.body.get("top_logprobs") is not None:
            case.body["logprobs"] = True  # or all conversations would stop there
    response = case.call(base_url=served.url, timeout=GENEROUS_S)
    assert response.status_code != 500, f"{response.text} for {case.as_curl_command()}"
    case.validate_response(response, checks=KEPT)
