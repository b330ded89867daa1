"""Every name of vLLM that Kaiseki relies on is there; a version that was not tested is refused in words."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

pytest.importorskip("vllm", reason="make test-vllm runs what needs vLLM")

from tests.vllm.rig import Rig

from kaiseki.engines.vllm import adapter

PLACES = [(place, name) for place, names in adapter.RELIED_ON.items() for name in names]


@pytest.fixture(scope="module")
def things(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KAISEKI_RUN_DIR", str(tmp_path_factory.mktemp("run")))
        rig = Rig({})
    rig.add("r", 40, 4)
    rig.step()
    scheduler = rig.scheduler
    manager = scheduler.kv_cache_manager
    one = manager.coordinator.single_type_managers[0]
    return {
        "a scheduler": scheduler,
        "a block manager": manager,
        "a coordinator": manager.coordinator,
        "a block manager of one kind": one,
        "a block pool": manager.block_pool,
        "a block": one.req_to_blocks["r"][0],
        "a request": scheduler.requests["r"],
    }


@pytest.mark.parametrize(("place", "name"), PLACES, ids=[f"{place}.{name}" for place, name in PLACES])
def test_it_is_there(place: str, name: str, things: dict[str, Any]) -> None:
    if place in things:
        assert hasattr(things[place], name)
        return
    module, _, cls = place.rpartition(".")
    found = getattr(import_module(module), cls)
    fields = getattr(found, "__dataclass_fields__", None) or getattr(found, "__struct_fields__", ())
    assert hasattr(found, name) or name in fields


def test_another_version_is_refused_in_words() -> None:
    adapter.check_version("0.32.4+cpu")
    with pytest.raises(
        adapter.UnsupportedVersion, match=r"vLLM 0\.33\.0: .*0\.32\.x \(tested with 0\.32\.0\)"
    ):
        adapter.check_version("0.33.0")
