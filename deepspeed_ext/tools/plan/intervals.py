# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""After how long to save again, and what share of the time saves and failures cost. Pure.

Note [When to save]
    A run trains for T seconds between two saves. A save holds training up for C seconds, its critical path, and is
    *good* L >= C seconds after it has begun: it is written and committed then. A synchronous save has L = C; during
    the L - C seconds of an asynchronous one, training goes on. Failures of the job come independently of each other,
    M seconds apart in the mean, and may come during a restart, which takes R seconds. Then the run continues from the
    last good save.

    *Time of a period.* From one good save to the next T + C seconds pass, in which T seconds are trained. If the job
    fails, it has also lost what it had trained while the last good save was being written. So each further attempt
    takes R + (L - C) + (T + C) = R + L + T seconds. An attempt of S seconds that is repeated until it succeeds takes
    M (e^(S/M) - 1) seconds in the mean. The first attempt takes only T + C seconds, so that in the mean a period takes

        E = M (1 - q) + (1 - q) M (e^((R + L + T)/M) - 1) = M e^((R + L - C)/M) (e^((T + C)/M) - 1),

    with q = e^(-(T + C)/M). The share of the time that is lost to saves, to work done again, and to restarts is
    1 - T/E. Source: overhead C and latency L are those of N. H. Vaidya, "Impact of checkpoint latency on overhead
    ratio of a checkpointing scheme", IEEE Transactions on Computers 46(8), 1997, pp. 942-947. With L = C this is the
    complete cost function of Daly's paper, below.

    *Best interval.* E/T is least where (1 - T/M) e^((T + C)/M) = 1. Neither R nor L is in that: the interval goes by
    what holds training up alone. Two approximations of T:

        Young   sqrt(2 C M)
        Daly    sqrt(2 C M) (1 + sqrt(C/2M)/3 + (C/2M)/9) - C     if C < 2M;     M otherwise

    J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications of the ACM 17(9),
    1974, pp. 530-531. J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
    Future Generation Computer Systems 22(3), 2006, pp. 303-312, equation 37.

    *Asynchronous saves.* The next save waits until the last one is good, so T + C >= L. E/T only rises beyond its
    minimum, hence the best interval that is possible is max(Daly, L - C). If nothing holds training up (C = 0), a run
    saves all the time: T = L.

    Left out: that training may be slower while files are written.
"""

import math


def young(held: float, mtbf: float) -> float:
    """Return Young's interval; see Note [When to save].

    Args:
        held: C, seconds for which a save holds training up.
        mtbf: M, mean seconds between failures of the job.
    """
    return math.sqrt(2 * held * mtbf)


def daly(held: float, mtbf: float) -> float:
    """Return Daly's interval; see Note [When to save]. Arguments as of ``young``."""
    ratio = held / (2 * mtbf)
    if ratio >= 1:
        return mtbf
    return young(held, mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - held


def share_lost(interval: float, held: float, lasts: float, mtbf: float, restart: float = 0.0) -> float:
    """Return the share of the time in which nothing is trained that lasts; see Note [When to save].

    Args:
        interval: T, seconds of training between two saves; above 0.
        held: C, seconds for which a save holds training up.
        lasts: L, seconds from the beginning of a save until it is good, at most ``interval + held``.
        mtbf: M, mean seconds between failures of the job.
        restart: R, seconds from a failure until training goes on.
    """
    # As E with all exponents negative, so that none is too large for a float.
    succeeds = math.exp(-(restart + lasts + interval) / mtbf)
    return 1 - interval / mtbf * succeeds / -math.expm1(-(interval + held) / mtbf)
