"""Observations of several updates: taken apart, put together, and attacked one by one."""

from __future__ import annotations

import dataclasses

import torch

import fedprism as fp
from fedprism.attacks import UpdateAttack, joined, split_updates

KNOWS = fp.threats.honest_but_curious.granting("labels", "batchnorm_exact")


def two_clients() -> fp.Observation:
    rng = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.BatchNorm2d(1), torch.nn.Flatten(), torch.nn.Linear(16, 3))
    clients = [fp.Batch(torch.rand(size, 1, 4, 4, generator=rng), torch.arange(size)) for size in (2, 3)]
    return fp.simulate(fp.Scenario(model=model, clients=clients), KNOWS, device="cpu")[0]


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Means(UpdateAttack):
    """Answers with the batch-norm mean that it was told, once per sample."""

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"batchnorm_exact", "batch_size"})

    def attack_update(self, observation: fp.Observation, rng: torch.Generator) -> fp.Reconstruction:
        knowledge = observation.knowledge
        return fp.Reconstruction(inputs=knowledge.batchnorm_exact["0.mean"].expand(knowledge.batch_size, 1), status="m")


def test_joined_updates_keep_their_own_statistics() -> None:
    observation = two_clients()
    parts = split_updates(observation)
    together = joined(parts)
    for name in ("batch_size", "labels", "batchnorm_exact"):
        before, after = getattr(observation.knowledge, name), getattr(together.knowledge, name)
        assert len(after) == 2
        assert all(mine is its for mine, its in zip(before, after, strict=True)), name


def test_an_attack_on_one_update_answers_for_several() -> None:
    observation = two_clients()
    means = [statistics["0.mean"] for statistics in observation.knowledge.batchnorm_exact]
    reconstruction = fp.run(Means(), observation, device="cpu")
    assert torch.equal(reconstruction.inputs, torch.stack([means[0]] * 2 + [means[1]] * 3))
    assert reconstruction.owners == ("client-0",) * 2 + ("client-1",) * 3
    assert reconstruction.knowledge_used == {"batchnorm_exact", "batch_size"}
    assert [part.subject for part, _ in reconstruction.per_update] == ["client-0", "client-1"]


def test_after_a_reduction_it_is_handed_every_part() -> None:
    observation = two_clients()

    @dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
    class Last(fp.attacks.Reduction):
        def reduce(self, observation: fp.Observation) -> tuple[fp.Observation, ...]:
            return split_updates(observation)[1:]

    reconstruction = fp.run(fp.attacks.then(Last(), Means()), observation, device="cpu")
    assert reconstruction.owners == ("client-1",) * 3
    assert len(reconstruction.per_update) == 1
