"""Elementary functions with the same bits on every machine.

A schedule is named by its bytes, so what it is drawn with must not depend on the mathematics library: exp
and log of the system, and the vector versions that numpy picks by processor, differ in the last bit.
Everything here is made of operations that IEEE 754 rounds one way (+, -, *, /, sqrt) and of exact scaling
by powers of 2. Relative errors are below 1e-14; arrays in, float64 arrays of the same shape out."""

from __future__ import annotations

import numpy as np

_LN2_HIGH, _LN2_LOW = (
    0.6931471803691238,
    1.9082149292705877e-10,
)  # the first has few enough bits: n * it is exact
_SQRT_HALF = 0.7071067811865476
_TINY = 1e-12  # shares are kept this far from 0 and 1, where a lognormal is 0 or infinite


def exp(x: np.ndarray) -> np.ndarray:
    """e^x: 2^n times a Taylor series around 0 on [-ln(2)/2, ln(2)/2]. Infinite above 709, 0 below -745."""
    x = np.asarray(x, dtype=float)
    n = np.rint(np.clip(x, -800, 800) * (1 / (_LN2_HIGH + _LN2_LOW)))
    r = (np.clip(x, -800, 800) - n * _LN2_HIGH) - n * _LN2_LOW
    series = np.ones_like(r)
    for k in range(14, 0, -1):
        series = 1 + r * series / k
    with np.errstate(over="ignore", under="ignore"):
        return np.ldexp(series, n.astype(np.int64))


def log(x: np.ndarray) -> np.ndarray:
    """ln x for x > 0: with x = 2^n m, m around 1, ln m = 2 artanh((m - 1) / (m + 1))."""
    m, n = np.frexp(np.asarray(x, dtype=float))
    low = m < _SQRT_HALF
    m, n = np.where(low, 2 * m, m), n - low
    s = (m - 1) / (m + 1)
    z = s * s
    series = np.zeros_like(s)
    for k in range(23, 0, -2):
        series = 1 / k + z * series
    return n * _LN2_HIGH + (2 * s * series + n * _LN2_LOW)


def power(x: np.ndarray, exponent: float) -> np.ndarray:
    """x^exponent for x > 0."""
    return exp(exponent * log(x))


# Wichura 1988, "Algorithm AS 241: The percentage points of the normal distribution": numerators and
# denominators, lowest power first, near the middle, in the tails and far out.
_MIDDLE = (
    (
        *(3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3, 1.3731693765509461125e4),
        *(4.5921953931549871457e4, 6.7265770927008700853e4, 3.3430575583588128105e4, 2.5090809287301226727e3),
    ),
    (
        *(1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3),
        *(2.1213794301586595867e4, 3.9307895800092710610e4, 2.8729085735721942674e4, 5.2264952788528545610e3),
    ),
)
_TAIL = (
    (
        *(1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0),
        *(3.64784832476320460504e0, 1.27045825245236838258e0, 2.41780725177450611770e-1),
        *(2.27238449892691845833e-2, 7.74545014278341407640e-4),
    ),
    (
        *(1.0, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1),
        *(1.48103976427480074590e-1, 1.51986665636164571966e-2, 5.47593808499534494600e-4),
        1.05075007164441684324e-9,
    ),
)
_FAR = (
    (
        *(6.65790464350110377720e0, 5.46378491116411436990e0, 1.78482653991729133580e0),
        *(2.96560571828504891230e-1, 2.65321895265761230930e-2, 1.24266094738807843860e-3),
        *(2.71155556874348757815e-5, 2.01033439929228813265e-7),
    ),
    (
        *(1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2),
        *(7.86869131145613259100e-4, 1.84631831751005468180e-5, 1.42151175831644588870e-7),
        2.04426310338993978564e-15,
    ),
)


def normal_quantile(u: np.ndarray) -> np.ndarray:
    """The standard normal value below which the share u lies; u is kept within 1e-12 of 0 and 1."""
    u = np.clip(np.asarray(u, dtype=float), _TINY, 1 - _TINY)
    q = u - 0.5
    x = q * _ratio(_MIDDLE, 0.180625 - q * q)
    tail = np.abs(q) > 0.425
    if tail.any():
        r = np.sqrt(-log(np.minimum(u[tail], 1 - u[tail])))
        value = np.where(r <= 5, _ratio(_TAIL, r - 1.6), _ratio(_FAR, r - 5))
        x[tail] = np.where(q[tail] < 0, -value, value)
    return x


def normal_share(x: np.ndarray) -> np.ndarray:
    """The share of a standard normal below x, to 1e-15: erf(z) = 2 z / sqrt(pi) e^(-z^2) sum (2 z^2)^n / (1
    3 5 .. (2n + 1))."""
    x = np.clip(np.asarray(x, dtype=float), -8.5, 8.5)
    square = x * x  # 2 z^2
    term = np.ones_like(x)
    total = np.ones_like(x)
    for n in range(1, 160):
        term = term * square / (2 * n + 1)
        total = total + term
        if n > 20 and not (term > 1e-17 * total).any():
            break
    return np.clip(0.5 + x * 0.3989422804014327 * exp(-square / 2) * total, 0.0, 1.0)


def interpolate(x: np.ndarray, points: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Straight lines through (points, values), flat beyond the first and last. points rise."""
    x, points, values = (np.asarray(a, dtype=float) for a in (x, points, values))
    if len(points) == 1:
        return np.full(x.shape, values[0])
    right = np.clip(np.searchsorted(points, x, side="right"), 1, len(points) - 1)
    left = right - 1
    share = np.clip((x - points[left]) / (points[right] - points[left]), 0.0, 1.0)
    return values[left] + share * (values[right] - values[left])


def _ratio(coefficients: tuple[tuple[float, ...], tuple[float, ...]], x: np.ndarray) -> np.ndarray:
    above, below = (np.full_like(x, c[-1]) for c in coefficients)
    for a, b in zip(coefficients[0][-2::-1], coefficients[1][-2::-1], strict=True):
        above, below = above * x + a, below * x + b
    return above / below
