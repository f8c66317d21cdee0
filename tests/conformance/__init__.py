"""Objectives of RL post-training as each framework defines them, and numbers to check them by.

The same name means different mathematics in different frameworks. A variant, such as `cispo@trl`,
is a formula, a loss in float64 numpy, and settings of ours that give the same numbers, if there are
any. `fixtures.py` holds the batches, `formulas.py` the pieces, `variants.py` the table, `ours.py`
runs our algorithms.

    make conformance               prints the table
    make conformance ARGS=cispo    its variants, with their formulas

Importing this package imports numpy and nothing else.
"""

from conformance.fixtures import FIXTURES, Fixture
from conformance.formulas import value_and_gradient
from conformance.rows import Variant
from conformance.variants import VARIANTS

__all__ = ["FIXTURES", "VARIANTS", "Fixture", "Variant", "value_and_gradient"]
