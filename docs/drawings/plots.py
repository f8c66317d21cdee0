"""Plots: from figures.json (measured, committed) and from the package's own functions."""

import json
from pathlib import Path

import numpy as np
from tunix_lite.algorithms.advantages import centre, leave_one_out, max_likelihood, standardise
from tunix_lite.learner.optim import OptimizerConfig, learning_rates

from svg import Axes, Picture

FIGURES = json.loads((Path(__file__).parent / "figures.json").read_text())


def learning_curve() -> Picture:
    run = FIGURES["quickstart"]
    p = Picture(860, 330, "avg@4 of the quick start over 60 steps, three seeds, and two completions")
    p.text(24, 32, "Share of right answers on 256 held-out problems", "big bold")
    axes = Axes(p, (60, 52, 400, 220), (0, 60), (40, 100))
    axes.ticks(run["steps"], [40, 50, 60, 70, 80, 90, 100], "%")
    axes.curve(run["steps"], run["greedy seed 0"], "line dash")
    for kind, seed in zip("abc", (0, 1, 2), strict=True):
        values = run[f"avg@4 seed {seed}"]
        axes.curve(run["steps"], values, f"l{kind} thick")
        for x, y in zip(run["steps"], values, strict=True):
            axes.dot(x, y, kind)
    p.text(256, 304, "updates (a minute on two idle CPU cores)", "mid small dim")
    p.text(178, 92, "greedy, seed 0", "small dim")
    p.text(452, 188, "avg@4, seeds 0, 1, 2", "end small ta")
    for y, kind, title, side in (
        (52, "b", "before", "before"),
        (152, "c", "after 60 updates", "after"),
    ):
        told = run["completions"][side]
        rows = told["completion"].split("\n")
        p.rect(490, y, 346, 58 + 17 * len(rows), kind)
        p.text(504, y + 20, title, "bold")
        p.text(822, y + 20, "right" if told["correct"] else "wrong", "bold end")
        p.text(504, y + 42, run["completions"]["prompt"], "mono dim")
        p.lines(504, y + 60, rows, "mono")
    return p


def real_model_curve() -> Picture:
    run = FIGURES["real"]
    p = Picture(860, 330, "Held-out accuracy of `make real` over 30 steps, three seeds, and two completions")
    p.text(24, 32, "SmolLM2 135M: the right word alone, of 64 held-out lists", "big bold")
    axes = Axes(p, (60, 52, 400, 220), (0, 30), (0, 100))
    axes.ticks(run["steps"], [0, 20, 40, 60, 80, 100], "%")
    for kind, seed in zip("abc", (0, 1, 2), strict=True):
        values = run[f"greedy seed {seed}"]
        axes.curve(run["steps"], values, f"l{kind} thick")
        for x, y in zip(run["steps"], values, strict=True):
            axes.dot(x, y, kind)
    p.text(256, 304, "updates (five to ten minutes on two CPU cores)", "mid small dim")
    p.text(452, 150, "greedy, seeds 0, 1, 2", "end small ta")
    p.lines(504, 72, run["prompt"], "mono dim")
    for y, kind, title in ((112, "b", "before"), (202, "c", "after")):
        rows = run[title]
        p.rect(490, y, 346, 40 + 17 * len(rows), kind)
        p.text(504, y + 20, title if title == "before" else "after 30 updates", "bold")
        p.text(822, y + 20, "wrong" if title == "before" else "right", "bold end")
        p.lines(504, y + 44, rows, "mono")
    return p


def clipping() -> Picture:
    p = Picture(860, 300, "The clipped objective of GRPO for a good and for a bad token")
    p.text(24, 32, "What a token adds to the objective, by its ratio", "big bold")
    ratio = np.linspace(0.4, 1.7, 131)
    for x, advantage, title in (
        (60, 1.0, "advantage 1: make it likelier"),
        (480, -1.0, "advantage -1: make it rarer"),
    ):
        clipped = np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.28) * advantage)
        low, high = (0.0, 2.0) if advantage > 0 else (-2.0, 0.0)
        axes = Axes(p, (x, 62, 340, 180), (0.4, 1.7), (low, high))
        axes.ticks([0.4, 0.8, 1.0, 1.28, 1.7], [low, (low + high) / 2, high])
        axes.curve(list(ratio), list(ratio * advantage), "line dash")
        axes.curve(list(ratio), list(clipped), ("lc" if advantage > 0 else "lb") + " thick")
        p.text(x + 4, 54, title, "small")
    p.text(
        24,
        284,
        "Where the curve is flat, the token has no gradient. Dashed: without the clip (0.8, 1.28).",
        "small dim",
    )
    return p


def advantages() -> Picture:
    p = Picture(860, 300, "Advantages of groups of eight with rewards 0 and 1")
    p.text(24, 32, "Advantage of a right completion, by how many of the eight are right", "big bold")
    kinds = [("grpo: / std", standardise, "la"), ("dr_grpo: - mean", centre, "lc")]
    kinds += [("rloo: leave one out", leave_one_out, "lb"), ("maxrl: / mean", max_likelihood, "ld")]
    axes = Axes(p, (60, 52, 500, 205), (0, 8), (0, 7))
    axes.ticks(list(range(9)), list(range(8)))
    for i, (name, function, kind) in enumerate(kinds):
        rewards = np.array([[1.0] * right + [0.0] * (8 - right) for right in range(1, 9)])
        values = [0.0, *np.asarray(function(rewards))[:, 0]]
        axes.curve(list(range(1, 9)), values[1:], f"{kind} thick")
        p.line([(600, 80 + 26 * i), (640, 80 + 26 * i)], f"{kind} thick")
        p.text(650, 84 + 26 * i, name)
    p.lines(
        600,
        206,
        ["A group that agrees (0 or 8 right)", "has advantage 0: it teaches nothing."],
        "small dim",
    )
    p.text(310, 288, "right completions in the group", "mid small dim")
    return p


def schedules() -> Picture:
    p = Picture(860, 270, "Learning-rate schedules")
    p.text(24, 32, "optimizer.schedule, 60 steps with 5 of warm-up; rate in 1e-5", "big bold")
    axes = Axes(p, (60, 52, 560, 175), (0, 60), (0, 4))
    axes.ticks([0, 5, 15, 30, 45, 60], [0, 1, 2, 3, 4])
    for i, (name, kind) in enumerate((("constant", "la"), ("linear", "lb"), ("cosine", "lc"))):
        settings = OptimizerConfig(learning_rate=4e-5, schedule=name, warmup_steps=5)
        rates = [*map(learning_rates(settings, 60), range(60))]
        axes.curve(list(range(1, 61)), [rate * 1e5 for rate in rates], f"{kind} thick")
        p.line([(660, 80 + 26 * i), (700, 80 + 26 * i)], f"{kind} thick")
        p.text(710, 84 + 26 * i, name)
    p.text(340, 258, "updates", "mid small dim")
    return p


def curves() -> Picture:
    run = FIGURES["curves"]
    p = Picture(860, 420, "Four curves of the quick start, seed 0")
    p.text(24, 32, "metrics.jsonl of the quick start, seed 0", "big bold")
    plots = [
        (
            "reward/mean",
            (0.4, 1.0),
            [0.4, 0.6, 0.8, 1.0],
            "la",
            "climbs, with noise of the prompts",
        ),
        (
            "completions/mean_length",
            (15, 40),
            [20, 30, 40],
            "lb",
            "rises: it shows its working",
        ),
        ("train/entropy", (0, 0.1), [0, 0.05, 0.1], "lc", "falls; near 0 nothing new is tried"),
        ("train/grad_norm", (0, 1.6), [0, 0.8, 1.6], "ld", "stays in one range; no spikes"),
    ]
    for i, (name, ys, ticks, kind, words) in enumerate(plots):
        x, y = 60 + 420 * (i % 2), 72 + 180 * (i // 2)
        axes = Axes(p, (x, y, 340, 110), (0, 60), ys)
        axes.ticks([0, 15, 30, 45, 60], ticks)
        values = run[name]
        axes.curve(list(range(1, len(values) + 1)), values, kind)
        mean = np.convolve(values, np.ones(7) / 7, "valid")
        axes.curve([k + 4 for k in range(len(mean))], list(mean), f"{kind} thick")
        p.text(x, y - 8, name, "mono")
        p.text(x + 340, y - 8, words, "small dim end")
    p.text(24, 408, "Thin: every step. Thick: the mean of seven.", "small dim")
    return p
