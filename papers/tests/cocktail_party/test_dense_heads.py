"""Dense features: separation fails alone, and works with public data."""

from __future__ import annotations

from dataclasses import replace

import fedprism as fp
from fedprism.solvers import ExactStatus
from fedprism_papers.cocktail_party.gradients import VictimBatches, match_features
from fedprism_papers.shared.base import Settings
from fedprism_papers.shared.victims import trained_cnn

QUICK = Settings(quick=True, device="cpu")


def test_public_data_tell_what_dense_features_have_in_common() -> None:
    victim = trained_cnn(QUICK, width=256, active=0.8, pool=4)
    alone = VictimBatches(victim=victim, size=8, batches=1)
    granted = replace(alone, public=32)
    attack = fp.attacks.cocktail_party(images=0)
    observation, truth = granted.observe(None, 0, QUICK)
    assert len(observation.knowledge.public_data or ()) == 32
    fed = victim.embed(truth.tensor, "cpu")
    assert (fed > 0).double().mean() > 0.9
    answer = fp.run(attack, observation, seed=0)
    assert "public_data" in answer.knowledge_used
    assert str(ExactStatus.EXACT) in answer.status
    assert answer.features is not None
    assert match_features(answer.features, fed)[0].min() > 1 - 1e-6
    unaided = fp.run(attack, alone.observe(None, 0, QUICK)[0], seed=0)
    assert unaided.features is not None
    assert unaided.diagnostics["confirmed"] == 0
    assert match_features(unaided.features, fed)[0].mean() < 0.9
