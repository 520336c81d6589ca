"""Tables of papers, run again: `fedprism reproduce cpa-table-1`. One folder per paper; nothing is downloaded."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping

from fedprism_papers.shared.base import Measured, Recipe, Row, Settings
from fedprism_papers.shared.report import carry_out, notes, planned, recorded_time, table

__all__ = [
    "RECIPES",
    "Measured",
    "Recipe",
    "Row",
    "Settings",
    "carry_out",
    "notes",
    "planned",
    "recorded_time",
    "table",
]

MODULES = {  # where a module has several recipes, `:` and the name of this one
    "cpa-table-1": "cocktail_party.tables_1_3_and_4:TABLE_1",
    "cpa-table-2": "cocktail_party.features:TABLE_2",
    "cpa-table-3": "cocktail_party.tables_1_3_and_4:TABLE_3",
    "cpa-table-4": "cocktail_party.tables_1_3_and_4:TABLE_4",
    "cpa-table-5": "cocktail_party.features:TABLE_5",
    "cpa-fig-7": "cocktail_party.features:FIG_7",
    "cpa-dense-heads": "cocktail_party.features:DENSE_HEADS",
    "cpa-defenses": "cocktail_party.defenses",
    "disaggregation-fig-2": "disaggregation.figures:FIG_2",
    "disaggregation-fig-3": "disaggregation.times:FIG_3",
    "disaggregation-fig-4": "disaggregation.figures:FIG_4",
    "disaggregation-fig-4-b": "disaggregation.figures:FIG_4_B",
    "disaggregation-fig-5": "disaggregation.figures:FIG_5",
    "disaggregation-fig-5-b": "disaggregation.panels:FIG_5_B",
    "disaggregation-fig-6": "disaggregation.figures:FIG_6",
    "disaggregation-fig-6-b": "disaggregation.panels:FIG_6_B",
    "disaggregation-fig-9": "disaggregation.fig_9",
    "disaggregation-table-1": "disaggregation.table_1",
    "disaggregation-table-2": "disaggregation.tables_2_and_3:TABLE_2",
    "disaggregation-table-3": "disaggregation.tables_2_and_3:TABLE_3",
    "disaggregation-defenses": "disaggregation.defenses",
    "gradattack-adaptive": "gradattack.adaptive",
    "gradattack-fig-1": "gradattack.fig_1",
    "gradattack-fig-2": "gradattack.fig_2",
    "gradattack-labels": "gradattack.labels",
    "gradattack-table-2": "gradattack.table_2",
    "gradattack-table-3": "gradattack.cost",
    "mixing": "mixing_gradients.mixing",
    "mixing-direct": "mixing_gradients.direct",
    "mkor-table-2": "mkor.table_2",
    "mkor-table-3": "mkor.vgg16:TABLE_3",
    "mkor-table-4": "mkor.vgg16:TABLE_4",
    "mkor-limits": "mkor.limits:LIMITS",
}


class _Recipes(Mapping[str, Recipe]):
    """Every recipe by its name; the module of one is imported when that one is asked for."""

    def __getitem__(self, name: str) -> Recipe:
        module, _, attribute = MODULES[name].partition(":")
        recipe: Recipe = getattr(importlib.import_module(f"fedprism_papers.{module}"), attribute or "RECIPE")
        return recipe

    def __iter__(self) -> Iterator[str]:
        return iter(MODULES)

    def __len__(self) -> int:
        return len(MODULES)


RECIPES: Mapping[str, Recipe] = _Recipes()
