"""Texts out of small random transformers: full gradients and LoRA, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

import fedprism as fp
from fedprism.attacks.token_inversion.attack import TokenStatus
from text_models import Positions, decoder, texts, with_lora


def attacked(
    model: nn.Module, lengths: Sequence[int], seed: int = 0, **options: object
) -> tuple[fp.Reconstruction, fp.Scores]:
    tokens, labels = texts(list(lengths), seed)
    if getattr(model, "classes", 0):
        labels = torch.arange(len(lengths)) % 4
    scenario = fp.Scenario(model=model, clients=[fp.Batch(tokens, labels)], **options)  # type: ignore[arg-type]
    observation, truth = fp.simulate(scenario, fp.threats.honest_but_curious, seed=0, device="cpu")
    answer = fp.run(fp.attacks.token_inversion(), observation, seed=0)
    return answer, fp.score(answer, truth)


def all_in_place(scores: fp.Scores) -> bool:
    return all(share == 1.0 for share in scores.values["tokens-in-place"])


@pytest.mark.parametrize("positions", ["rotary", "absolute", "none"])
@pytest.mark.parametrize("lengths", [(5,), (4, 8, 10)], ids=len)
def test_full_gradients_give_every_text_in_order(positions: Positions, lengths: Sequence[int]) -> None:
    answer, scores = attacked(decoder(positions=positions), lengths)
    assert answer.status == TokenStatus.EXACT
    assert all_in_place(scores)


def test_a_single_text_of_an_encoder_is_told_by_its_positions() -> None:
    answer, scores = attacked(decoder(positions="absolute", classes=4, causal=False), (10,))
    assert answer.status == TokenStatus.EXACT
    assert all_in_place(scores)


def test_several_texts_of_an_encoder_give_their_tokens() -> None:
    answer, scores = attacked(decoder(positions="absolute", classes=4, causal=False), (10, 10))
    assert answer.status.startswith(TokenStatus.SET)
    assert all(share == 1.0 for share in scores.values["tokens"])


def test_frozen_embeddings_hide_nothing() -> None:
    model = decoder()
    model.table.requires_grad_(False)
    answer, scores = attacked(model, (6, 9))
    assert answer.status == TokenStatus.EXACT
    assert all_in_place(scores)


def test_classes_of_texts_are_found_with_them() -> None:
    answer, scores = attacked(decoder(classes=4), (10, 10))
    assert answer.status == TokenStatus.EXACT
    assert all_in_place(scores)
    assert scores.labels_match


def test_repeated_tokens_keep_their_places() -> None:
    tokens = torch.tensor([[7, 7, 9, 7, 9, 9, 0, 0, 0, 0]])
    labels = torch.tensor([[7, 9, 7, 9, 9, 0, -100, -100, -100, -100]])
    scenario = fp.Scenario(model=decoder(), clients=[fp.Batch(tokens, labels)])
    observation, _ = fp.simulate(scenario, fp.threats.honest_but_curious, seed=0)
    answer = fp.run(fp.attacks.token_inversion(), observation)
    assert answer.status == TokenStatus.EXACT
    assert torch.equal(answer.tensor, tokens)


@pytest.mark.parametrize("rank", [4, 16])
def test_adapters_give_a_text_in_order_with_fewer_rows_than_tokens_or_more(rank: int) -> None:
    answer, scores = attacked(with_lora(decoder(), rank), (9,))
    assert answer.status == TokenStatus.EXACT
    assert all_in_place(scores)


@pytest.mark.parametrize("parts", ["q", "v", "qkvo"])
def test_adapters_on_any_projections_give_the_tokens(parts: str) -> None:
    answer, scores = attacked(with_lora(decoder(), 16, parts), (6,))
    # Softmax over one token has no gradient: queries say nothing of the first token of a text.
    assert min(s for s in scores.values["tokens"] if s is not None) >= (0.9 if parts == "q" else 1.0)
    assert (answer.status == TokenStatus.EXACT) == (parts != "q")


def test_several_texts_with_more_tokens_than_rows_come_in_order() -> None:
    answer, scores = attacked(with_lora(decoder(), 4), (5, 6, 7))
    assert answer.status == TokenStatus.EXACT
    assert all_in_place(scores)
    assert answer.diagnostics["chosen_one_by_one"] > 0


@pytest.mark.parametrize("protocol", [fp.FedAvg(lr=0.1), fp.FedAvg(lr=0.1, epochs=3)], ids=["one step", "three steps"])
def test_local_steps_of_adapters_give_the_texts(protocol: fp.FedAvg) -> None:
    answer, scores = attacked(with_lora(decoder(), 16), (6, 4), protocol=protocol)
    assert answer.status == TokenStatus.EXACT
    assert all_in_place(scores)


def test_several_steps_of_all_parameters_give_the_tokens() -> None:
    answer, scores = attacked(decoder(), (6, 4), protocol=fp.FedAvg(lr=0.1, epochs=3))
    assert answer.status.startswith(TokenStatus.SET)
    assert all(share == 1.0 for share in scores.values["tokens"])


def test_steps_of_adam_are_refused() -> None:
    with pytest.raises(fp.NotApplicable, match="sums of gradients"):
        attacked(with_lora(decoder(), 16), (6,), protocol=fp.FedAvg(lr=1e-3, optimizer=fp.optimizers.AdamW()))


def test_the_first_step_of_adapters_tells_few_tokens_by_their_second_factors() -> None:
    answer, scores = attacked(with_lora(decoder(), 16, started=False), (4, 4))
    assert answer.status == TokenStatus.EXACT
    assert all_in_place(scores)


def test_the_first_step_of_small_adapters_tells_nothing() -> None:
    with pytest.raises(fp.NotApplicable, match="to tell the tokens of the batch"):
        attacked(with_lora(decoder(), 4, started=False), (8,))


def test_more_tokens_than_dimensions_are_refused() -> None:
    with pytest.raises(fp.NotApplicable, match="more vectors in the rows than the width can tell apart"):
        attacked(decoder(), [9] * 8)


def test_a_trained_head_alone_tells_no_tokens() -> None:
    model = decoder(classes=4).requires_grad_(False)
    model.head.requires_grad_(True)
    with pytest.raises(fp.NotApplicable, match="labels may still be told"):
        attacked(model, (6, 8))


def test_noise_hides_the_texts() -> None:
    with pytest.raises(fp.NotApplicable, match="to tell the tokens of the batch"):
        attacked(decoder(), (5, 8), defense=fp.defenses.GaussianNoise(0.1))


def test_numbers_are_not_read_as_tokens() -> None:
    model = fp.models.build("fc2", input_shape=(1, 8, 8), hidden=8, classes=3, seed=0)
    scenario = fp.Scenario(model=model, clients=[fp.Batch(torch.rand(1, 1, 8, 8), torch.tensor([0]))])
    observation, _ = fp.simulate(scenario, fp.threats.honest_but_curious, seed=0)
    with pytest.raises(fp.NotApplicable, match="looks tokens up"):
        fp.run(fp.attacks.token_inversion(), observation)
