"""Figures of recorded traces, from which the generators draw; the traces themselves are not shipped.

Sources, each taken once from the whole trace:

- Azure LLM inference trace 2023, conversation (Patel et al., Splitwise, ISCA 2024), CC-BY 4.0: 19,366
  requests in 3,501.7 s.
- Mooncake conversation trace (Qin et al., FAST 2025), Apache-2.0: 12,031 requests in 3,537 s.
"""

from __future__ import annotations

from kaiseki.work.lengths import LogNormal, Quantiles

# fmt: off
PROBABILITIES = (
    0, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6,
    0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.925, 0.95, 0.975, 0.99, 0.995, 0.999, 1,
)

AZURE_RPS = 19_366 / 3_501.72
AZURE_REQUESTS_PER_MINUTE = (
    191, 265, 329, 353, 307, 273, 268, 261, 322, 298, 301, 302, 345, 326, 283, 279, 280, 308, 343,
    351, 351, 343, 408, 396, 386, 398, 432, 480, 476, 453, 448, 507, 438, 413, 423, 418, 465, 311,
    329, 316, 333, 355, 319, 360, 334, 375, 330, 249, 221, 249, 265, 280, 256, 254, 242, 260, 246,
    225,
)
"""The first 58 minutes. Within a minute arrivals are Poisson; the rate swings by a factor of 2.6."""
AZURE_PROMPT = Quantiles(
    PROBABILITIES,
    (
        2, 17, 29, 120, 181, 200, 207, 372, 387, 396, 403, 414, 703, 984, 1020, 1045, 1071, 1097,
        1130, 1189, 1315, 1876, 2734, 4075, 4083, 4092, 4142, 4831, 6179, 14050,
    ),
)
AZURE_OUTPUT = Quantiles(
    PROBABILITIES,
    (
        7, 14, 16, 28, 41, 48, 54, 67, 77, 85, 91, 96, 103, 113, 129, 151, 177, 217, 384, 395, 400,
        411, 424, 430, 451, 522, 601, 643, 954, 1000,
    ),
)
AZURE_PROMPT_LOGNORMAL = LogNormal(760.0, 0.985, 2, 14_050)
"""Same mean and spread of the logarithm as the trace; the trace itself has steps that no lognormal has."""
AZURE_OUTPUT_LOGNORMAL = LogNormal(151.3, 0.859, 7, 1_000)

MOONCAKE_RPS = 12_031 / 3_540
"""Times are multiples of 3 s there, so the last arrivals stand for 3 s more than the last time."""
MOONCAKE_GAP_CV = 1.6
"""Gamma gaps with this spread give the variance of requests per minute that the trace has."""
MOONCAKE_PROMPT = Quantiles(
    PROBABILITIES,
    (
        891, 893, 894, 896, 901, 913, 964, 1261, 1662, 2306, 3263, 4251, 4993, 5870, 6909, 8187,
        9570, 11238, 13196, 15367, 17869, 21464, 27367, 31519, 39550, 58977, 85400, 100810, 121301,
        126195,
    ),
)
MOONCAKE_OUTPUT = Quantiles(
    PROBABILITIES,
    (
        1, 1, 3, 3, 10, 17, 24, 46, 100, 156, 213, 256, 291, 322, 350, 375, 399, 423, 447, 472, 504,
        543, 597, 639, 698, 835, 1119, 1568, 2000, 2000,
    ),
)

MOONCAKE_SYSTEM_BLOCKS = 1
"""All requests share their first block of 512 tokens."""
MOONCAKE_FOLLOW_UPS = 0.3872
"""Requests that share more than that with an earlier one, mostly to go on with a conversation..."""
MOONCAKE_BRANCH_SHARE = 0.4337
"""...and how many they are of those with at least a full block after the first."""
MOONCAKE_LAG = Quantiles(
    PROBABILITIES,
    (
        5, 35, 44, 70, 100, 124, 141, 176, 204, 229, 257, 290, 324, 367, 422, 481, 550, 643, 757,
        901, 1087, 1315, 1661, 1873, 2129, 3056, 5105, 6686, 8870, 10514,
    ),
)
"""How many requests ago the earlier one was."""
MOONCAKE_DEPTH = Quantiles(
    PROBABILITIES,
    (
        0.015, 0.029, 0.037, 0.062, 0.111, 0.16, 0.231, 0.375, 0.474, 0.571, 0.677, 0.795, 0.857,
        0.895, 0.918, 0.933, 0.944, 0.956, 0.964, 0.97, 0.976, 0.982, 0.985, 0.989, 0.991, 0.994, 1,
        1, 1, 1,
    ),
)
"""Shared blocks over own blocks of those requests, weighted by their blocks: what matters is blocks found."""
MOONCAKE_FIRST = Quantiles(
    PROBABILITIES,
    (
        379, 381, 382, 383, 385, 388, 393, 431, 580, 824, 1245, 2255, 3401, 4075, 4752, 5676, 6906,
        8316, 10259, 12544, 15359, 18925, 25047, 29999, 37982, 58125, 89356, 111120, 120648, 125683,
    ),
)
"""Tokens after the shared first block, of requests that share no more."""
MOONCAKE_MORE = Quantiles(
    PROBABILITIES,
    (
        1, 1, 1, 1, 163, 249, 305, 401, 473, 534, 590, 644, 698, 762, 829, 899, 992, 1136, 1679,
        3495, 5018, 7269, 9741, 11460, 14691, 18555, 26705, 32596, 54157, 94968,
    ),
)
"""Tokens after the shared prefix, of requests that share more."""
MOONCAKE_TURN_MEDIAN_S = 123.0
MOONCAKE_TURN_SIGMA = 0.98
"""Lognormal time from such a request back to the earlier one: answering and thinking together."""
# fmt: on
