"""The dashboard as a file is what the code builds, and asks for metrics that there are."""

from __future__ import annotations

import json
import re
from importlib.resources import files

import yaml
from tests.harness import Bench, job

from kaiseki.observe.exposition import expose
from kaiseki.observe.grafana.build import dashboard_json
from kaiseki.observe.grafana.panels import ROWS

FOLDER = files("kaiseki.observe.grafana")
NAME = re.compile(r"\b(?:vllm:|kaiseki_)\w+")


def exported() -> set[str]:
    bench = Bench("fcfs")
    bench.submit(job("r", 40, 4), list(range(40)))
    bench.run()
    page = expose(bench.driver.metrics).decode()
    return set(NAME.findall(page))


def test_the_file_is_what_the_code_builds() -> None:
    assert FOLDER.joinpath("kaiseki.json").read_text() == dashboard_json()


def test_every_query_asks_for_metrics_that_are_exported() -> None:
    rules = yaml.safe_load(FOLDER.joinpath("alerts.yaml").read_text())["groups"][0]["rules"]
    queries = [query for panels in ROWS.values() for panel in panels for query, _ in panel.queries]
    asked = {name for text in (*queries, *(rule["expr"] for rule in rules)) for name in NAME.findall(text)}
    known = exported()
    # Families without a sample yet show only their own name, without `_total`.
    assert {name for name in asked if name not in known and name.removesuffix("_total") not in known} == set()


def test_panels_ask_for_their_data_source() -> None:
    board = json.loads(dashboard_json())
    panels = [panel for panel in board["panels"] if panel["type"] == "timeseries"]
    assert len(panels) == sum(map(len, ROWS.values()))
    assert {panel["datasource"]["uid"] for panel in panels} == {"${datasource}"}
