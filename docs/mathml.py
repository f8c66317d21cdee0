"""Formulas as MathML, which browsers draw themselves: no script, no network, right in the dark."""

from docutils import nodes
from docutils.utils.math import latex2mathml


def _as_mathml(translator, node: nodes.Node, is_block: bool) -> None:
    tree = latex2mathml.tex2mathml(node.astext(), as_block=is_block)
    label = f' id="{node["ids"][0]}"' if node.get("ids") else ""
    tag = "div" if is_block else "span"
    translator.body.append(f'<{tag} class="math"{label}>{tree}</{tag}>')
    raise nodes.SkipNode


def visit_inline(translator, node: nodes.math) -> None:
    _as_mathml(translator, node, is_block=False)


def visit_block(translator, node: nodes.math_block) -> None:
    _as_mathml(translator, node, is_block=True)


def setup(app) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    return {"parallel_read_safe": True}
