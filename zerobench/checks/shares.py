"""What one rank's share of the model states costs, and when a few ranks' shares say nothing of the world's."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from zerobench.checks.check import NotApplicable, View
from zerobench.claims import Recipe
from zerobench.terms import DTYPE_NBYTES, Category


def element_nbytes(category: Category, recipe: Recipe, moments: int) -> int:
    """Bytes of one element in a category."""
    if category is Category.PARAMETER:
        return DTYPE_NBYTES[recipe.parameter]
    if category is Category.GRADIENT:
        return DTYPE_NBYTES[recipe.gradient]
    master = DTYPE_NBYTES[recipe.master] if recipe.master else 0
    return master + moments * DTYPE_NBYTES[recipe.moments]


def refuse_uneven(view: View, category: Category, each: Sequence[int], most: Fraction) -> None:
    """Raises NotApplicable where the ranks that ran hold different amounts of what is sharded, none of them more than
    one parameter above its share: optimizers that deal out whole parameters do."""
    parameter = max(view.model.parameters.values(), default=0)
    most += parameter * element_nbytes(category, view.recipe, view.moments)
    if len(set(each)) > 1 and max(each) <= most:
        ran = ", ".join(str(s.rank) for s in view.samples)
        raise NotApplicable(f"shares are uneven, and their sum over all {view.n} ranks is due: only ranks {ran} ran")
