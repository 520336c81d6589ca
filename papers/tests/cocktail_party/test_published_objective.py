"""The published Cocktail Party objective: each term against a slow computation, and planted mixtures of photographs."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from scipy.integrate import quad
from scipy.optimize import linear_sum_assignment
from torch import Tensor

import fedprism as fp
from fedprism.solvers import StudentICA, UnmixStatus
from fedprism_papers.cocktail_party.published_objective import (
    GAUSSIAN_LOG_COSH,
    CocktailObjective,
    _problem,
    _value_and_slope,
    embedding_objective,
    separate,
)

SHAPE = (3, 32, 32)


def cocktail_value(
    objective: CocktailObjective, rows: Tensor, coordinates: Tensor, image_shape: tuple[int, ...] | None
) -> float:
    """The objective at given un-mixing rows (n, n): what `separate` makes small. Ignores the rows' lengths."""
    problem = _problem(objective, coordinates, image_shape)
    turned = torch.linalg.solve(problem.whitening, rows.to(coordinates.device).double(), left=False)
    value, _ = _value_and_slope(problem, (turned / turned.norm(dim=1, keepdim=True)).float())
    return float(value)


NOTHING = CocktailObjective(independence=0, temperature=3.0, total_variation=0, sparsity=0, sign=0, negentropy=0)
FAST = CocktailObjective(independence=0.1, lr=1e-2, iterations=1500)


def correlations(a: Tensor, b: Tensor) -> Tensor:
    """Absolute correlation of every row of a with every row of b."""
    centred = [x - x.mean(1, keepdim=True) for x in (a, b)]
    unit = [x / x.norm(dim=1, keepdim=True) for x in centred]
    return (unit[0] @ unit[1].T).abs()


def matched(sources: Tensor, truth: Tensor) -> Tensor:
    """The absolute correlation of each true image with the source assigned to it."""
    table = correlations(sources, truth)
    return table[linear_sum_assignment(-table.numpy())]


def photographs(photos: fp.data.ImageSet, count: int, seed: int) -> Tensor:
    """Photographs that are hardly correlated, at most by 0.14 to 0.24 for eight: sources as the method supposes them.

    Next comes the one whose largest correlation with those before is least.
    """
    everything = photos.draw(len(photos), torch.Generator().manual_seed(seed)).inputs.flatten(1).double()
    table, chosen = correlations(everything, everything), [0]
    while len(chosen) < count:
        chosen.append(int(table[chosen].max(0).values.index_fill(0, torch.tensor(chosen), torch.inf).argmin()))
    return everything[chosen]


def mixing(count: int, seed: int) -> Tensor:
    """A random matrix (count, count) with condition number 10."""
    rng = torch.Generator().manual_seed(seed)
    left, right = (torch.linalg.qr(torch.randn(count, count, generator=rng, dtype=torch.double))[0] for _ in range(2))
    return left @ torch.diag(torch.linspace(1, 0.1, count, dtype=torch.double)) @ right


@pytest.mark.quality
@pytest.mark.parametrize("seed", [0, 1, 100])
def test_eight_photographs_come_out_of_their_mixtures(seed: int, photos: fp.data.ImageSet) -> None:
    images = photographs(photos, 8, seed)
    mixtures = mixing(8, seed) @ images
    rows = separate(FAST, mixtures, SHAPE)
    assert rows.shape == (8, 8)
    assert rows.dtype == mixtures.dtype
    assert matched(rows @ mixtures, images).min() > 0.9  # 0.95 to 0.99 over ten seeds
    assert matched(mixtures, images).mean() < 0.8  # not trivial: the mixtures are no photographs


@pytest.mark.quality
@pytest.mark.parametrize("left_out", ["total_variation", "independence"])
def test_without_smoothness_or_independence_it_fails(left_out: str, photos: fp.data.ImageSet) -> None:
    images = photographs(photos, 8, 0)
    mixtures = mixing(8, 0) @ images
    full = matched(separate(FAST, mixtures, SHAPE) @ mixtures, images)
    ablated = separate(dataclasses.replace(FAST, **{left_out: 0.0}), mixtures, SHAPE)
    assert matched(ablated @ mixtures, images).mean() < full.mean() - 0.15  # 0.25 to 0.77 over ten seeds


def test_sparse_embeddings_come_out_with_the_embedding_weights(rng: torch.Generator) -> None:
    embeddings = torch.randn(6, 2000, generator=rng, dtype=torch.double).clamp(min=0)
    embeddings *= torch.rand(6, 2000, generator=rng) < 0.3
    mixtures = mixing(6, 0) @ embeddings
    objective = dataclasses.replace(embedding_objective(), lr=1e-2, iterations=1500)
    assert matched(separate(objective, mixtures, None) @ mixtures, embeddings).min() > 0.9
    bare = dataclasses.replace(objective, sparsity=0.0, sign=0.0)  # nothing but decorrelation: principal components
    assert matched(separate(bare, mixtures, None) @ mixtures, embeddings).min() < 0.8


@pytest.mark.quality
def test_correlated_photographs_do_not_come_out_and_their_objective_says_why(photos: fp.data.ImageSet) -> None:
    images = photos.draw(8, torch.Generator().manual_seed(0)).inputs.flatten(1).double()
    first, second = (image / image.std() for image in images[:2])
    images[1] = 0.6 * first + 0.4 * second  # one seen through the other
    assert correlations(images, images).fill_diagonal_(0).max() > 0.6
    matrix = mixing(8, 0)
    mixtures = matrix @ images
    rows = separate(FAST, mixtures, SHAPE)
    assert matched(rows @ mixtures, images).min() < 0.8
    # The minimum is elsewhere: more steps would not help.
    assert cocktail_value(FAST, rows, mixtures, SHAPE) < cocktail_value(FAST, matrix.inverse(), mixtures, SHAPE)


def whitened(mixtures: Tensor) -> tuple[Tensor, Tensor]:
    """An independent whitening (by singular values): the signal as it is, and centred."""
    mean = mixtures.mean(1, keepdim=True)
    left, sizes, _ = torch.linalg.svd(mixtures - mean, full_matrices=False)
    whitening = torch.diag(math.sqrt(mixtures.shape[1] - 1) / sizes) @ left.T
    return whitening @ mixtures, whitening @ (mixtures - mean)


def slow_terms(sources: Tensor, centred: Tensor, correlation: Tensor, sides: tuple[int, ...]) -> dict[str, float]:
    """Every term of the objective by loops over sources, pixels and pairs."""
    n, d = sources.shape
    pairs = [(i, j) for i in range(n) for j in range(n) if i != j]
    images = sources.view(n * sides[0], *sides[1:])
    across = [abs(float(x[r, c + 1] - x[r, c])) for x in images for r in range(sides[1]) for c in range(sides[2] - 1)]
    down = [abs(float(x[r + 1, c] - x[r, c])) for x in images for r in range(sides[1] - 1) for c in range(sides[2])]
    gaps = [sum(math.log(math.cosh(float(v))) for v in row) / d - GAUSSIAN_LOG_COSH for row in centred]
    return {
        "independence": sum(math.expm1(3.0 * abs(float(correlation[i, j]))) for i, j in pairs) / len(pairs),
        "total_variation": sum(across) / len(across) + sum(down) / len(down),
        "sparsity": sum(abs(float(v)) for row in sources for v in row) / (n * d),
        "sign": sum(
            min(
                math.sqrt(sum(float(v) ** 2 for v in row if v > 0)), math.sqrt(sum(float(v) ** 2 for v in row if v < 0))
            )
            for row in sources
        )
        / n,
        "negentropy": -sum(gap**2 for gap in gaps) / n,
    }


@pytest.mark.parametrize("term", ["independence", "total_variation", "sparsity", "sign", "negentropy"])
def test_each_term_agrees_with_a_slow_computation(term: str, rng: torch.Generator) -> None:
    sides = (2, 5, 4)
    mixtures = torch.rand(4, 40, generator=rng, dtype=torch.double).pow(3)
    rows = torch.randn(4, 4, generator=rng, dtype=torch.double)
    # The sources of these rows, scaled so that the centred ones have unit variance, as rows of unit length give them.
    sources = rows @ mixtures
    deviation = sources.std(dim=1, keepdim=True)
    sources = sources / deviation
    centred = sources - sources.mean(1, keepdim=True)
    expected = slow_terms(sources, centred, centred @ centred.T / 39, sides)[term]
    objective = dataclasses.replace(NOTHING, **{term: 0.7})
    assert cocktail_value(objective, rows, mixtures, sides) == pytest.approx(0.7 * expected, rel=1e-4)
    assert cocktail_value(NOTHING, rows, mixtures, sides) == 0


def test_the_slope_is_the_derivative_of_the_value(rng: torch.Generator) -> None:
    objective = CocktailObjective(independence=0.4, temperature=3.0, sparsity=0.5, sign=0.3, negentropy=2.0)
    mixtures = torch.rand(4, 60, generator=rng, dtype=torch.double).pow(3)
    problem = _problem(objective, mixtures, (3, 5, 4))
    signal, centred = whitened(mixtures)
    problem = problem._replace(signal=signal, centred=centred)  # float64, so that differences of values are exact
    rows = torch.nn.functional.normalize(torch.randn(4, 4, generator=rng, dtype=torch.double), dim=1)
    _, slope = _value_and_slope(problem, rows)
    step = 1e-7
    for entry in range(16):
        change = torch.zeros(16, dtype=torch.double).index_fill(0, torch.tensor(entry), step).view(4, 4)
        above, below = (_value_and_slope(problem, rows + sign * change)[0] for sign in (1, -1))
        assert float(slope.flatten()[entry]) == pytest.approx(float(above - below) / (2 * step), abs=2e-5)


def test_the_gaussian_reference_is_right() -> None:
    value, _ = quad(lambda x: math.log(math.cosh(x)) * math.exp(-x * x / 2) / math.sqrt(2 * math.pi), -30, 30)
    assert pytest.approx(value, abs=5e-7) == GAUSSIAN_LOG_COSH


def test_the_objective_falls_and_scale_of_the_mixtures_does_not_matter(photos: fp.data.ImageSet) -> None:
    mixtures = mixing(4, 1) @ photographs(photos, 4, 1)
    quick = dataclasses.replace(FAST, iterations=100)
    reports: list[tuple[int, int]] = []
    rows = separate(quick, mixtures, SHAPE, progress=lambda done, total: reports.append((done, total)))
    start = separate(dataclasses.replace(quick, iterations=1), mixtures, SHAPE)
    assert cocktail_value(quick, rows, mixtures, SHAPE) < cocktail_value(quick, start, mixtures, SHAPE)
    assert reports == [(done, 100) for done in range(1, 101)]
    tiny = separate(quick, 1e-12 * mixtures, SHAPE)
    torch.testing.assert_close(1e-12 * tiny, rows, rtol=1e-2, atol=1e-3 * float(rows.abs().max()))


def test_a_repeated_image_is_not_blown_up(photos: fp.data.ImageSet) -> None:
    images = photographs(photos, 3, 2)
    mixtures = mixing(4, 2) @ torch.cat([images, images[:1]])
    rows = separate(dataclasses.replace(FAST, iterations=50), mixtures, SHAPE)
    assert rows.isfinite().all()
    assert (rows @ mixtures).abs().max() < 1e3


@pytest.mark.parametrize("image_shape", [None, (3072,), (3, 16, 16)])
def test_total_variation_without_an_image_is_refused(image_shape: tuple[int, ...] | None) -> None:
    with pytest.raises(ValueError, match="image_shape must hold 3072 entries"):
        separate(FAST, torch.rand(2, 3072), image_shape)


def test_numbers_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="mixtures must be finite"):
        separate(FAST, torch.full((2, 3072), torch.nan), SHAPE)


def test_the_objective_is_shown_as_it_is_made() -> None:
    assert eval(repr(embedding_objective())) == embedding_objective()
    assert eval(repr(CocktailObjective(lr=0.01))) == CocktailObjective(lr=0.01)


@pytest.mark.quality
def test_the_attack_separates_better_by_likelihood(photos: fp.data.ImageSet) -> None:
    model = fp.models.build("fc2", input_shape=SHAPE, hidden=64, classes=10, seed=0)
    batch = fp.Batch(photographs(photos, 4, 0).float().view(-1, *SHAPE), torch.arange(4))
    observation, truth = fp.simulate(
        fp.Scenario(model=model, clients=[batch]), fp.threats.honest_but_curious, device="cpu"
    )
    quality = {}
    for name, objective in (("published", CocktailObjective(iterations=50)), ("ours", StudentICA())):
        attack = fp.attacks.CocktailParty(objective=objective, exact=False)
        reconstruction = fp.run(attack, observation, device="cpu")
        assert reconstruction.status == UnmixStatus.SEPARATED
        quality[name] = fp.score(reconstruction, truth, metrics=("psnr",)).mean("psnr")
    assert quality["ours"] > quality["published"] + 5
