"""When requests are sent, in open loop."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

Arrivals = Literal["poisson", "uniform"]


def send_times(
    count: int, rate: float, arrivals: Arrivals = "poisson", burstiness: float = 1.0, seed: int = 0
) -> list[float]:
    """Seconds from the run's start at which `count` requests are due, the first at 0, `rate` a second in the mean.

    uniform: evenly. poisson: gaps from a gamma distribution of shape `burstiness` and mean 1 / rate; at 1 these are
    exponential, a Poisson process, below 1 burstier and above 1 more even. An infinite rate: all at once.
    """
    if math.isinf(rate):
        return [0.0] * count
    if arrivals == "uniform":
        return [i / rate for i in range(count)]
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), max(0, count - 1))
    return [0.0, *np.cumsum(gaps).tolist()][:count]
