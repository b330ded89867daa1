"""A deployment whose passes take what a profile says."""

from __future__ import annotations

import numpy as np

from kaiseki.core.decision import F64
from kaiseki.core.protocols import N_FEATURES
from kaiseki.cost.calibrated import SPREAD_AT, Profile
from kaiseki.cost.deployment import Deployment
from kaiseki.cost.kernels import N_FORM
from kaiseki.cost.roofline import Roofline

_DRAWN = 4096
"""Numbers drawn at once."""


class Profiled(Roofline):
    """Measured times in place of the roofline's; memory, energy and price stay the deployment's.

    Raises:
        ValueError: the deployment has several stages, and a profile says nothing of each.
    """

    def __init__(self, deployment: Deployment, profile: Profile) -> None:
        if deployment.pp > 1:
            raise ValueError(f"pp: {deployment.pp}; a profile is of one pass, so it must be 1")
        super().__init__(deployment)
        self._planes = profile.planes()
        kinds, forms, _ = self._planes.shape
        self.terms = np.zeros((kinds, forms, N_FORM))
        self.terms[:, :, :N_FEATURES] = self._planes

    def stage_terms(self, stage: int) -> F64:
        """There is one."""
        return self.terms

    def observe(self, features: F64, measured_ns: int) -> None:
        """Nothing is learnt."""


class Spread:
    """Draws how much longer than predicted steps take, from the quantiles of a profile.

    Each step on its own: that a slow step is often followed by another is not in a profile.

    Args:
        profile: with a spread, or every step takes what is predicted.
        seed: the same seed gives the same steps.
    """

    def __init__(self, profile: Profile, seed: int) -> None:
        self._profile = profile
        self._rng = np.random.default_rng(seed)
        self._drawn: list[float] = []

    def draw(self) -> float:
        """Measured over predicted time of one step."""
        if not self._profile.spread:
            return 1.0
        if not self._drawn:
            places = self._rng.uniform(0.0, 1.0, _DRAWN)
            self._drawn = np.interp(places, SPREAD_AT, self._profile.spread).tolist()
        return self._drawn.pop()
