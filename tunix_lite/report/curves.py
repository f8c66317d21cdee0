"""The curves of a run: which there are, and what is said beside them."""

from collections.abc import Iterator
from dataclasses import dataclass

from tunix_lite.report.charts import Chart, Line, number_text, smoothed
from tunix_lite.report.evidence import Evidence, Series
from tunix_lite.report.page import Block, Charts, Folded, Table, Text
from tunix_lite.tracking.console import as_words
from tunix_lite.tracking.dashboard import spark_bars

# steps from which on a curve is smoothed
MANY = 20


@dataclass(frozen=True)
class Curve:
    """A chart of a run: which metrics it shows.

    Example: Curve("reward", ("reward/mean",)).
    """

    title: str
    # each is a line; those of eval/ get a dot at each evaluation
    metrics: tuple[str, ...]
    is_share: bool = False
    # what the legend calls them; none: as the metric
    names: tuple[str, ...] = ()
    # whether a comparison of runs shows its first metric, too
    in_comparison: bool = False


TWO = ("in training", "held out, greedy")
CURVES = (
    Curve("reward", ("reward/mean", "eval/reward"), False, TWO, True),
    Curve(
        "held-out accuracy", ("eval/accuracy", "eval/avg_at_", "eval/pass_at_"), True, ("greedy",)
    ),
    Curve("right in training", ("completions/correct",), True),
    Curve("groups that teach nothing", ("reward/groups_that_agree",), True),
    Curve(
        "completion length, tokens",
        ("completions/mean_length", "eval/mean_length"),
        False,
        TWO,
        True,
    ),
    Curve("cut off at the longest length", ("completions/truncated", "eval/truncated"), True, TWO),
    Curve("entropy, nats a token", ("train/entropy",), in_comparison=True),
    Curve("KL to the reference, nats a token", ("train/kl",), in_comparison=True),
    Curve("gap of sampler and trainer, nats", ("train/sampler_gap",)),
    Curve("ratio outside of the clip", ("train/ratio_outside_clip",), True),
    Curve("loss", ("train/loss",)),
    Curve("gradient norm", ("train/grad_norm",), in_comparison=True),
    Curve("learning rate", ("train/learning_rate",), in_comparison=True),
    Curve(
        "seconds of a step",
        ("time/step", "time/rollout", "time/update"),
        names=("step", "sampling", "update"),
    ),
    Curve("tokens a second and device", ("perf/tokens_per_second_per_device",), in_comparison=True),
)


def curves(run: Evidence, chosen: tuple[Curve, ...] = CURVES) -> list[Chart]:
    """The charts for which the run has numbers."""
    charts = []
    for curve in chosen:
        every = [(color, run.series(name)) for color, name in enumerate(metrics_of(run, curve))]
        every = [(color, series) for color, series in every if series is not None]
        lines = []
        for color, series in every:
            name = as_words(series.name.rpartition("/")[2]) if len(curve.metrics) > 1 else ""
            name = curve.names[color] if color < len(curve.names) else name
            lines += curve_lines(series, name, color)
        if not any(any(line.values) for line in lines):
            continue

        # Beside the title: the first and the last number of the first metric.
        note = ""
        color, series = every[0]
        if color == 0:
            ends = (series.early, series.late)
            if series.name.startswith("eval/") or series.name == "train/learning_rate":
                ends = (series.first, series.last)
            note = " → ".join(number_text(value, curve.is_share) for value in ends)
        charts.append(Chart(curve.title, lines, curve.is_share, note))
    return charts


def curve_blocks(run: Evidence) -> Iterator[Block]:
    if not run.rows:
        yield Text("No step was made.")
        return
    yield Charts(curves(run))
    many = "A thick line is the moving average of the thin one. " if len(run.rows) >= MANY else ""
    yield Text(
        f"{many}Beside a title stand the first and the last evaluation, or else the means of the "
        "first and of the last third of the steps."
    )


def metrics_of(run: Evidence, curve: Curve) -> list[str]:
    """The metrics of a curve; `eval/pass_at_` stands for the one that the run has."""
    last = run.evaluations[-1] if run.evaluations else {}
    names = []
    for name in curve.metrics:
        names += [key for key in last if key.startswith(name)][:1] if name[-1] == "_" else [name]
    return names


def curve_lines(series: Series, name: str, color: int, only_one: bool = False) -> list[Line]:
    """A metric as it is, and where it has many steps a smooth line over it, or that alone."""
    steps = series.steps.tolist()
    values = series.values.tolist()
    if series.name.startswith("eval/") and (only_one or len(steps) <= MANY):
        return [Line(name, steps, values, color, "points" if len(steps) <= MANY else "line")]
    if len(steps) < MANY or series.name == "train/learning_rate":
        return [Line(name, steps, values, color)]
    smooth = smoothed(values, max(len(steps) / 12, 4))
    if only_one:
        return [Line(name, steps, smooth, color)]
    return [Line(name, steps, values, color, "faint"), Line(name, steps, smooth, color, "smooth")]


def number_blocks(run: Evidence) -> Block:
    """Every curve in numbers."""
    rows = []
    for curve in CURVES:
        for name in metrics_of(run, curve):
            series = run.series(name)
            if series is None:
                continue
            values = (series.first, series.last, series.values.min(), series.largest)
            cells = [f"{value:.4g}" for value in (*values, series.early, series.late)]
            rows.append([name, spark_bars(series.values.tolist(), 16), *cells])
    heads = ["metric", "curve", "first", "last", "least", "most", "first third", "last third"]
    return Folded("first, last, least and most of each metric", Table(heads, rows, 2))
