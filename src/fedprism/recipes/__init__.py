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
    disaggregation_defenses,
    disaggregation_fig_2,
    disaggregation_fig_3,
    disaggregation_fig_4,
    disaggregation_fig_5,
    disaggregation_fig_9,
    disaggregation_table_1,
    disaggregation_table_2,
    disaggregation_table_3,
    gradattack_table_2,
    mixing_direct,
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
    "disaggregation-fig-2": disaggregation_fig_2.RECIPE,
    "disaggregation-fig-3": disaggregation_fig_3.RECIPE,
    "disaggregation-fig-4": disaggregation_fig_4.RECIPE,
    "disaggregation-fig-5": disaggregation_fig_5.RECIPE,
    "disaggregation-fig-9": disaggregation_fig_9.RECIPE,
    "disaggregation-table-1": disaggregation_table_1.RECIPE,
    "disaggregation-table-2": disaggregation_table_2.RECIPE,
    "disaggregation-table-3": disaggregation_table_3.RECIPE,
    "disaggregation-defenses": disaggregation_defenses.RECIPE,
    "gradattack-table-2": gradattack_table_2.RECIPE,
    "mixing-direct": mixing_direct.RECIPE,
}

__all__ = ["RECIPES", "Outcome", "Recipe", "Row", "Settings"]
