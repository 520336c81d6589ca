"""The defenses of table 2, with the paper's numbers.

Huang, Gupta, Song, Li, Arora, "Evaluating Gradient Inversion Attacks and Defenses in Federated Learning", NeurIPS 2021,
table 2: test accuracy, and average and best LPIPS for batches of 1, 16 and 32. The weights of total variation are those
it gives for each kind of defense.
"""

from __future__ import annotations

from fedprism.defenses import InstaHide, MixUp
from fedprism.recipes.gradattack_attackers import Case

CASES = (
    Case(label="none", paper_accuracy=93.37, paper=((0.19, 0.02), (0.45, 0.18), (0.45, 0.18))),
    Case(label="GradPrune 0.5", ratio=0.5, paper_accuracy=93.19, paper=((0.19, 0.02), (0.46, 0.19), (0.46, 0.18))),
    Case(label="GradPrune 0.7", ratio=0.7, paper_accuracy=93.01, paper=((0.22, 0.05), (0.47, 0.19), (0.48, 0.22))),
    Case(label="GradPrune 0.9", ratio=0.9, paper_accuracy=90.57, paper=((0.35, 0.14), (0.51, 0.31), (0.52, 0.31))),
    Case(label="GradPrune 0.95", ratio=0.95, paper_accuracy=89.92, paper=((0.42, 0.22), (0.55, 0.43), (0.54, 0.43))),
    Case(label="GradPrune 0.99", ratio=0.99, paper_accuracy=88.61, paper=((0.52, 0.32), (0.58, 0.47), (0.58, 0.48))),
    Case(label="GradPrune 0.999", ratio=0.999, paper_accuracy=83.58, paper=((0.52, 0.36), (0.61, 0.51), (0.63, 0.54))),
    Case(
        label="MixUp 4",
        mixing=MixUp(4),
        variation=0.1,
        paper_accuracy=92.31,
        paper=((0.34, 0.12), (0.34, 0.11), (0.50, 0.31)),
    ),
    Case(
        label="MixUp 6",
        mixing=MixUp(6),
        variation=0.1,
        paper_accuracy=90.41,
        paper=((0.46, 0.25), (0.31, 0.13), (0.49, 0.28)),
    ),
    Case(
        label="Intra-InstaHide 4",
        mixing=InstaHide(4),
        variation=0.01,
        paper_accuracy=90.04,
        paper=((0.58, 0.41), (0.62, 0.41), (0.69, 0.56)),
    ),
    Case(
        label="Intra-InstaHide 6",
        mixing=InstaHide(6),
        variation=0.01,
        paper_accuracy=88.20,
        paper=((0.61, 0.42), (0.63, 0.44), (0.69, 0.56)),
    ),
    Case(
        label="GradPrune 0.9 + MixUp 4",
        ratio=0.9,
        mixing=MixUp(4),
        variation=0.1,
        paper_accuracy=91.37,
        paper=((0.41, 0.21), (0.46, 0.22), (0.62, 0.37)),
    ),
    Case(
        label="GradPrune 0.9 + Intra-InstaHide 4",
        ratio=0.9,
        mixing=InstaHide(4),
        variation=0.01,
        paper_accuracy=86.10,
        paper=((0.60, 0.43), (0.68, 0.54), (0.73, 0.65)),
    ),
)
