"""Build the dashboard's JSON: `python -m kaiseki.observe.grafana.build > kaiseki.json`."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard, DatasourceVariable, Row
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.builders.timeseries import Panel as TimeSeries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import DataSourceRef

from kaiseki.observe.grafana.panels import ROWS, Panel

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
WIDTH, HEIGHT = 8, 7
"""Of a panel, on Grafana's grid of 24 columns."""


def dashboard_json() -> str:
    """The dashboard, ready to be imported or provisioned; it asks for the data source."""
    board = (
        Dashboard("Kaiseki")
        .uid("kaiseki")
        .tags(["kaiseki", "llm"])
        .refresh("10s")
        .time("now-30m", "now")
        .with_variable(DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    for name, panels in ROWS.items():
        board = board.with_row(Row(name))
        for panel in panels:
            board = board.with_panel(_panel(panel))
    return f"{JSONEncoder(sort_keys=True, indent=2).encode(board.build())}\n"


def _panel(panel: Panel) -> TimeSeries:
    made = TimeSeries().title(panel.title).description(panel.about).unit(panel.unit).min(0)
    made = made.datasource(SOURCE).span(WIDTH).height(HEIGHT)
    for query, legend in panel.queries:
        made = made.with_target(Dataquery().expr(query).legend_format(legend))
    return made


if __name__ == "__main__":
    print(dashboard_json(), end="")
