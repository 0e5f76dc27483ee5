"""Parameters of tests that have several axes."""

import itertools

import pytest


def each_value_once(**axes):
    """Parametrise all combinations; those not needed to use every value once are marked slow."""
    values = {name: list(each) for name, each in axes.items()}
    longest = max(map(len, values.values()))
    default = {tuple(each[n % len(each)] for each in values.values()) for n in range(longest)}
    rows = itertools.product(*values.values())
    marked = [pytest.param(*row, marks=() if row in default else pytest.mark.slow) for row in rows]
    return pytest.mark.parametrize(tuple(values), marked)
