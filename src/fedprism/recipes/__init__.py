"""Tables of papers, run again: `fedprism reproduce cpa-table-1`. One file a table; nothing is downloaded."""

from __future__ import annotations

from fedprism.recipes import (
    cocktail_party_defenses,
    cpa_fig_7,
    cpa_table_1,
    cpa_table_2,
    cpa_table_3,
    cpa_table_4,
    cpa_table_5,
)
from fedprism.recipes.base import Outcome, Recipe, Row, Settings

RECIPES: dict[str, Recipe] = {
    "cpa-table-1": cpa_table_1.RECIPE,
    "cpa-table-2": cpa_table_2.RECIPE,
    "cpa-table-3": cpa_table_3.RECIPE,
    "cpa-table-4": cpa_table_4.RECIPE,
    "cpa-table-5": cpa_table_5.RECIPE,
    "cpa-fig-7": cpa_fig_7.RECIPE,
    "cpa-defenses": cocktail_party_defenses.RECIPE,
}

__all__ = ["RECIPES", "Outcome", "Recipe", "Row", "Settings"]
