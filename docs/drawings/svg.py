"""A picture as text: shapes on an opaque card, in colours that follow the reader's light or dark.

A page shows a picture as an image, which sees the system's colour scheme and not the page's. The
card is opaque, so it can be read on either.
"""

from html import escape

STYLE = """
text{font:13px ui-sans-serif,system-ui,"Segoe UI",Helvetica,Arial,sans-serif;fill:#1f2430}
.card{fill:#fff;stroke:#d5d9e2}.soft{fill:#f2f4f8;stroke:#c9cfdb}.line{stroke:#5b6475;fill:none}
.grid{stroke:#e4e7ee;fill:none}.dim{fill:#5b6475}.small{font-size:11px}.big{font-size:16px}
.bold{font-weight:600}.mono{font-family:ui-monospace,Menlo,Consolas,monospace;font-size:12px}
.a{fill:#cfe3ff;stroke:#3572c6}.b{fill:#ffe1b8;stroke:#b9741a}.c{fill:#cdeed3;stroke:#2f8747}
.d{fill:#f3d1ea;stroke:#a3418a}.e{fill:#e2e5ec;stroke:#8a92a3}
.la{stroke:#3572c6;fill:none}.lb{stroke:#c2761a;fill:none}.lc{stroke:#2f8747;fill:none}
.ld{stroke:#a3418a;fill:none}.ta{fill:#2c61ab}.tb{fill:#9a5d10}.tc{fill:#25703a}.td{fill:#8d3577}
.thick{stroke-width:2.5}.dash{stroke-dasharray:5 4}.head{fill:#5b6475}
.mid{text-anchor:middle}.end{text-anchor:end}
@media(prefers-color-scheme:dark){
text{fill:#e6e9ef}.card{fill:#161a22;stroke:#343b49}.soft{fill:#20262f;stroke:#414a5a}
.line{stroke:#a2abbc}.grid{stroke:#2b323e}.dim{fill:#a9b2c2}.head{fill:#a2abbc}
.a{fill:#1d3d68;stroke:#74a9f0}.b{fill:#5a3c12;stroke:#eaa64c}.c{fill:#1c4a2a;stroke:#6cc486}
.d{fill:#54234a;stroke:#dd86c7}.e{fill:#333a46;stroke:#7c8596}
.la{stroke:#74a9f0}.lb{stroke:#eaa64c}.lc{stroke:#6cc486}.ld{stroke:#dd86c7}
.ta{fill:#93bdf7}.tb{fill:#f0b96d}.tc{fill:#86d59e}.td{fill:#e79fd4}}
"""


def number(x: float) -> str:
    return f"{x:.1f}".rstrip("0").rstrip(".")


class Picture:
    """Shapes in the order they are drawn; `str` of it is the file.

    Example: p = Picture(200, 80, "a box"); p.box(10, 10, 60, 40, "q", "a"); str(p)
    """

    def __init__(self, width: int, height: int, title: str):
        self.width, self.height, self.title = width, height, title
        self.shapes: list[str] = []

    def add(self, name: str, inner: str | None = None, **attributes) -> None:
        words = []
        for key, value in attributes.items():
            text = number(value) if isinstance(value, float | int) else escape(str(value))
            words.append(f'{key.strip("_").replace("_", "-")}="{text}"')
        start = f"<{name} {' '.join(words)}"
        self.shapes.append(f"{start}/>" if inner is None else f"{start}>{inner}</{name}>")

    def rect(self, x: float, y: float, w: float, h: float, kind: str = "soft") -> None:
        self.add("rect", x=x, y=y, width=w, height=h, rx=4 if min(w, h) > 14 else 1, class_=kind)

    def text(self, x: float, y: float, words: str, kind: str = "") -> None:
        self.add("text", escape(words), x=x, y=y, class_=kind)

    def lines(self, x: float, y: float, rows: list[str], kind: str = "", gap: float = 17) -> None:
        for i, row in enumerate(rows):
            self.text(x, y + gap * i, row, kind)

    def box(self, x: float, y: float, w: float, h: float, words: str, kind: str = "soft") -> None:
        """A rectangle with lines of text in its middle."""
        self.rect(x, y, w, h, kind)
        rows = words.split("\n")
        first = y + h / 2 + 4.5 - 8 * (len(rows) - 1)
        for i, row in enumerate(rows):
            self.text(x + w / 2, first + 16 * i, row, "mid" if i else "mid bold")

    def line(self, points: list[tuple[float, float]], kind: str = "line") -> None:
        self.add("polyline", points=" ".join(f"{number(x)},{number(y)}" for x, y in points), class_=kind)

    def arrow(self, x0: float, y0: float, x1: float, y1: float, kind: str = "line") -> None:
        """Along one axis, or down and across; the head is at (x1, y1)."""
        self.line([(x0, y0), (x1, y1)], kind)
        length = max(((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5, 1e-9)
        ux, uy = (x1 - x0) / length, (y1 - y0) / length
        corners = [(x1, y1)]
        corners += [(x1 - 8 * ux - 4 * s * uy, y1 - 8 * uy + 4 * s * ux) for s in (1, -1)]
        self.add(
            "polygon",
            points=" ".join(f"{number(x)},{number(y)}" for x, y in corners),
            class_="head",
        )

    def __str__(self) -> str:
        w, h = self.width, self.height
        card = f'<rect x="0.5" y="0.5" width="{w - 1}" height="{h - 1}" rx="8" class="card"/>'
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{w}" height="{h}" '
            f'viewBox="0 0 {w} {h}" role="img"><title>{escape(self.title)}</title>'
        )
        return "\n".join([head, f"<style>{STYLE}</style>", card, *self.shapes, "</svg>", ""])


class Axes:
    """A plot in a frame: data to pixels, ticks, curves.

    Example: Axes(p, (60, 20, 300, 200), (0, 60), (40, 100)).curve(steps, values, "la thick")
    """

    def __init__(
        self,
        picture: Picture,
        frame: tuple[float, float, float, float],
        xs: tuple[float, float],
        ys: tuple[float, float],
    ):
        self.picture, self.frame, self.xs, self.ys = picture, frame, xs, ys

    def at(self, x: float, y: float) -> tuple[float, float]:
        left, top, width, height = self.frame
        across = (x - self.xs[0]) / (self.xs[1] - self.xs[0])
        up = (y - self.ys[0]) / (self.ys[1] - self.ys[0])
        return left + width * across, top + height * (1 - up)

    def ticks(self, xs: list[float], ys: list[float], unit: str = "", x_unit: str = "") -> None:
        left, top, width, height = self.frame
        for y in ys:
            at = self.at(self.xs[0], y)[1]
            self.picture.line([(left, at), (left + width, at)], "grid")
            self.picture.text(left - 7, at + 4, f"{y:g}{unit}", "small dim end")
        for x in xs:
            at = self.at(x, self.ys[0])[0]
            self.picture.text(at, top + height + 17, f"{x:g}{x_unit}", "small dim mid")
        self.picture.line([(left, top), (left, top + height), (left + width, top + height)])

    def curve(self, xs: list[float], ys: list[float], kind: str) -> None:
        self.picture.line([self.at(x, y) for x, y in zip(xs, ys, strict=True)], kind)

    def dot(self, x: float, y: float, kind: str) -> None:
        cx, cy = self.at(x, y)
        self.picture.add("circle", cx=cx, cy=cy, r=3.2, class_=kind)
