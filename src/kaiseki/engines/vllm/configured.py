"""Settings inside vLLM: the same YAML as everywhere, from `--additional-config` or `KAISEKI_CONFIG`.

`--additional-config '{"kaiseki": {...}}'` holds the settings themselves, `'{"kaiseki": "FILE"}'` and
`KAISEKI_CONFIG=FILE` name a file, which is read again when it changes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from kaiseki import config
from kaiseki.config import Settings
from kaiseki.sections import ConfigError

ENVIRONMENT = "KAISEKI_CONFIG"

_log = logging.getLogger(__name__)


class Configured:
    """The settings in force.

    Args:
        additional_config: vLLM's, of which the key `kaiseki` is ours.

    Raises:
        ConfigError: with every problem of the settings.
        OSError: the file can't be read.
    """

    def __init__(self, additional_config: Mapping[str, Any] | None) -> None:
        given = (additional_config or {}).get("kaiseki")
        if given is None:
            given = os.environ.get(ENVIRONMENT) or {}
        self.path = Path(given) if isinstance(given, str) else None
        self._seen_ns = self._changed_ns()
        self.settings = config.load(self.path) if self.path else config.parse(yaml.safe_dump(given))

    def changed(self) -> Settings | None:
        """The settings, if the file has changed since; one with problems is logged and left alone."""
        stamp = self._changed_ns()
        if self.path is None or stamp in (self._seen_ns, 0):
            return None
        self._seen_ns = stamp
        try:
            self.settings = config.load(self.path)
        except (OSError, ConfigError) as error:
            _log.error("%s: not read again, what held before goes on: %s", self.path, error)
            return None
        return self.settings

    def _changed_ns(self) -> int:
        try:
            return self.path.stat().st_mtime_ns if self.path else 0
        except OSError:  # it is being replaced, as Kubernetes does with a ConfigMap
            return 0
