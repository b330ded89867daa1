"""What was decided inside vLLM is explained from its recording, while it is still written."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="make test-vllm runs what needs vLLM")

from tests.vllm.rig import Rig

from kaiseki.observe.recorder.past import explain_recorded
from kaiseki.observe.recorder.reading import read

CLASSES = {
    "urgent": {"ttft_ms": 300, "tbt_ms": 60, "weight": 8},
    "normal": {"ttft_ms": 20_000, "tbt_ms": 200},
}


def test_a_victim_learns_in_whose_favour(tmp_path: Path) -> None:
    rig = Rig({"classes": CLASSES, "recorder": {"folder": str(tmp_path), "size_mb": 4}}, max_num_seqs=4)
    for i in range(4):
        rig.add(f"n{i}", 60, 40, **{"class": "normal"})
    while len(rig.scheduler.running) < 4:
        rig.step()
    rig.add("urgent", 60, 10, **{"class": "urgent"})
    rig.run()
    (recording,) = read(tmp_path)
    told = [explain_recorded(recording, name) for name in rig.told]
    assert all(document is not None and document["timeline"] for document in told)
    details = [entry["detail"] for document in told for entry in document["timeline"]]
    assert any("in favour of urgent" in detail for detail in details), details


def test_a_folder_that_cannot_be_written_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    rig = Rig({"recorder": {"folder": str(tmp_path / "file" / "below")}}, max_num_seqs=4)
    rig.add("r", 60, 4)
    rig.run()
    assert rig.told["r"].tokens == rig.expected("r", 4)
