"""The references by hand and by other projects' vectors, our algorithms against them in every layout, and the page."""

from functools import cache
from itertools import product
from pathlib import Path

import jax
import numpy as np
import pytest
from conformance import FIXTURES, VARIANTS, formulas, ours, table, value_and_gradient
from conformance.__main__ import main
from conformance.fixtures import Fixture
from conftest import set_mesh

from tunix_lite.learner.packing import RowShape
from tunix_lite.learner.rows import RowLayout

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "references" / "conformance.md"


@cache
def cells() -> list[table.Cell]:
    return table.cells()


# ---- the references


def small(rewards, mask, logprobs, old=None, ref=None, sampler=None) -> Fixture:
    """A fixture by hand."""
    old, ref, sampler = (np.zeros_like(logprobs) if x is None else x for x in (old, ref, sampler))
    arrays = (np.array(x, float) for x in (logprobs, old, sampler, ref))
    rewards = np.array(rewards, float)
    return Fixture("small", "", rewards, np.array(mask, bool), *arrays, np.zeros((2, *rewards.shape)), 10)


def test_values_and_gradients_by_hand():
    """Two tokens of ratio 2, A = 1 and -1, of 1e8 and of 1; weights 1/4 each."""
    log2 = np.log(2)
    mask, logprobs = np.ones((2, 2)), np.array([[log2, np.log(1e8)], [log2, 0.0]])
    fixture = small([[2, 0]], mask, logprobs)  # centred: 1 and -1
    value, gradient = value_and_gradient(
        formulas.objective(formulas.less_group_mean, formulas.clipped(0.2, 0.28)), fixture
    )
    assert value == pytest.approx(-(1.28 + 1.28 - 2 - 1) / 4)
    np.testing.assert_allclose(gradient, [[0, 0], [2 / 4, 1 / 4]], rtol=1e-12)
    # the dual clip: no gradient where A < 0 and the ratio is above 1.5
    value, gradient = value_and_gradient(
        formulas.objective(formulas.less_group_mean, formulas.clipped(0.2, 0.28, dual=1.5)), fixture
    )
    assert value == pytest.approx(-(1.28 + 1.28 - 1.5 - 1) / 4)
    np.testing.assert_allclose(gradient, [[0, 0], [0, 1 / 4]], rtol=1e-12)
    # the sequence's ratio of the second is sqrt 2, above its bound, and A < 0 keeps the gradient
    gspo = formulas.objective(formulas.less_group_mean, formulas.clipped(0.2, 0.28, formulas.ratio_of_completions))
    np.testing.assert_allclose(value_and_gradient(gspo, fixture)[1][1], [2**0.5 / 4] * 2, rtol=1e-12)
    # k3 of d = -log 2: 1/2 + log 2 - 1, with the slope 1 - 1/2
    for kl, slope in ((formulas.kl_k3, 0.5), (formulas.kl_k2, log2)):
        penalty = formulas.objective(formulas.less_group_mean, lambda t: 0 * t.lp, kl=kl, kl_coef=1.0)
        assert value_and_gradient(penalty, fixture)[1][0, 0] == pytest.approx(slope / 4)
    # DPO: the margin is (log 2 + log 1e8) - log 2, the slope beta sigmoid(-beta margin) each way
    value, gradient = value_and_gradient(formulas.preferences(0.1), fixture)
    rest = 1 / (1 + np.exp(0.1 * np.log(1e8)))
    assert value == pytest.approx(-np.log(1 - rest))
    np.testing.assert_allclose(gradient, 0.1 * rest * np.array([[-1, -1], [1, 1]]), rtol=1e-12)


def test_divergences_of_four_tokens_by_hand():
    """Of (1, 1, 1/e, 1/e^2) / total in both models, and of a teacher whose first token is twice as likely."""
    here = np.array([[0.0]])
    total, log2 = 2 + np.exp(-1) + np.exp(-2), np.log(2)
    far = small([[1]], [[1]], here, ref=np.array([[log2]]))
    near = small([[1]], [[1]], here)
    # q is p times total / (total + 1), and twice that at the first token
    gap = np.log((total + 1) / total)
    forward, slope = value_and_gradient(formulas.divergence(formulas.forward_kl), far)
    assert forward == pytest.approx(2 / (total + 1) * log2 - gap)
    np.testing.assert_allclose(slope, [[1 / total - 2 / (total + 1)]])
    reverse, _ = value_and_gradient(formulas.divergence(formulas.reverse_kl), far)
    assert reverse == pytest.approx(gap - log2 / total)
    for apart in (formulas.forward_kl, formulas.reverse_kl):
        assert value_and_gradient(formulas.divergence(apart), near)[0] == pytest.approx(0, abs=1e-12)
    mixed, _ = value_and_gradient(formulas.divergence(formulas.jensen_shannon(0.5)), far)
    assert 0 < mixed < forward / 2
    entropy = formulas.objective(formulas.less_group_mean, lambda t: 0 * t.lp, kl=formulas.less_entropy, kl_coef=1.0)
    assert -value_and_gradient(entropy, near)[0] == pytest.approx(np.log(total) + (np.exp(-1) + 2 * np.exp(-2)) / total)


def test_every_reference_is_finite_and_moves_with_its_log_probabilities():
    for name, variant in VARIANTS.items():
        moves = False
        for fixture in FIXTURES.values():
            if variant.loss is None or (variant.binary and not fixture.is_binary):
                continue
            value, gradient = value_and_gradient(variant.loss, fixture)
            assert np.isfinite(value) and np.isfinite(gradient).all(), (name, fixture.name)
            assert not gradient[~fixture.counted].any(), (name, fixture.name)
            moves |= bool(gradient.any())
        assert moves or variant.loss is None, name


# ---- ours


def test_settings_that_a_row_names_give_its_numbers_on_every_fixture():
    assert {cell.variant.name: cell.differs for cell in cells() if cell.differs} == {}
    assert sum(cell.ours == table.GREEN for cell in cells()) >= 60
    assert len({cell.variant.by for cell in cells()} - {"paper"}) >= 8


LAYOUTS = {
    "none_parts": (4, 1, RowLayout(), 3),
    "sequences_tp": (2, 2, RowLayout("sequences", 2, shape=RowShape(40), rows_per_micro_batch=4), 2),
    "prefix_parts": (1, 1, RowLayout("prefix", 4, shape=RowShape(8, 3, 1), rows_per_micro_batch=8), 4),
}
IN_ROWS = ["grpo@verl", "gspo@paper", "tis_token@verl", "dpo@paper"]
IN_SHORT = dict(zip(IN_ROWS, ("sequences_tp", "prefix_parts", "none_parts", "sequences_tp"), strict=True)).items()


@pytest.mark.parametrize(
    "name, layout",
    [pytest.param(*pair, marks=() if pair in IN_SHORT else pytest.mark.wide) for pair in product(IN_ROWS, LAYOUTS)],
)
def test_packed_micro_batched_and_sharded_it_is_the_same(name, layout):
    fsdp, tp, rows, num_micro_batches = LAYOUTS[layout]
    variant = VARIANTS[name]
    with jax.set_mesh(set_mesh(fsdp, tp)):
        fixture = FIXTURES["dropped" if layout == "prefix_parts" else "plain"]
        algorithm = ours.algorithm_of(variant.ours, fixture)
        batch = ours.collected(algorithm, fixture, variant.sampled)
        found = ours.in_rows(algorithm, batch, fixture, rows, num_micro_batches)
        expected = value_and_gradient(variant.loss, fixture)
        assert ours.difference(fixture, found, expected) == ""


# ---- the page


def test_the_page_is_what_the_module_gives():
    assert PAGE.read_text() == table.page(cells())
    readme = (PAGE.parents[2] / "README.md").read_text()
    names = len({variant.objective for variant in VARIANTS.values()})
    assert f"{len(VARIANTS)} variants of {names} objectives" in readme


def test_the_commands_of_the_page_print_the_table_and_some_formulas(capsys):
    """Both of them; the results are those of the tests above."""
    main([])
    assert len(capsys.readouterr().out.splitlines()) == len(VARIANTS)
    main(["cispo"])
    shown = capsys.readouterr().out
    assert "cispo@verl" in shown and "- sg[clip(rho, 0.8, 1.2)] A lp" in shown and "gspo" not in shown
    with pytest.raises(SystemExit, match="no variant is called cipso"):
        main(["cipso"])
