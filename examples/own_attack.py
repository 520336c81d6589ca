"""An attack of your own: answer every sample with the mean image of the data the attacker holds itself."""

from dataclasses import dataclass

import torch

import fedprism as fp


@dataclass(frozen=True, kw_only=True, repr=False)
class MeanImage(fp.attacks.UpdateAttack):
    """A baseline that looks at no update. An attack that does no better has learned nothing about the samples."""

    brightness: float = 1.0

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"public_data", "batch_size"})

    def attack_update(self, observation: fp.Observation, rng: torch.Generator) -> fp.Reconstruction:
        knowledge = observation.knowledge
        mean = self.brightness * knowledge.public_data.inputs.mean(0, keepdim=True)
        return fp.Reconstruction(
            inputs=mean.expand(knowledge.batch_size, *mean.shape[1:]).clone(),
            ambiguity=frozenset({"order"}),
            status="the mean of the public data, without a look at the update",
        )


digits = fp.data.load("digits", size=16)
model = fp.models.build("fc2", input_shape=(1, 16, 16), hidden=32, classes=10, seed=0)
# Public data are other digits, none of them the client's.
scenario = fp.Scenario(model=model, clients=[digits.batch([700, 800])], public_data=digits.batch(range(500)))
observation, _ = fp.simulate(scenario, fp.threats.honest_but_curious, seed=0)

try:
    fp.run(MeanImage(), observation)
except fp.MissingKnowledge as refusal:
    print("refused:", refusal)

informed, truth = fp.simulate(scenario, fp.threats.honest_but_curious.granting("public_data"), seed=0)
for attack in (MeanImage(brightness=1.2), fp.attacks.dense_inversion()):
    reconstruction = fp.run(attack, informed, seed=0)
    print(attack, "used", sorted(reconstruction.knowledge_used))
    print(fp.score(reconstruction, truth, metrics=("psnr",)))
