"""A live region on a terminal that becomes narrower: the terminal wraps the lines that stand there,
and rich, which counts lines, would leave the upper ones behind."""

from collections.abc import Iterable
from dataclasses import dataclass

import rich.console
import rich.control
import rich.segment


@dataclass
class Rewrapped:
    """Erases the rows by which a region has grown since it was drawn; a render hook of rich that
    stands before that of rich.live.Live.

    Terminals that cut lines off instead (xterm) lose as many rows of text above the region. These
    are in train.log.

    Example: a region of 10 lines, each 140 columns wide, is 20 rows high at 80 columns, so the hook
    erases 10 rows more than rich does.
    """

    terminal: rich.console.Console
    # of each line of the region as it was drawn last, in columns
    widths: tuple[int, ...] = ()

    def measured(self, region: rich.console.RenderableType) -> "NotedRegion":
        """The region, which notes the widths of its lines when it is drawn."""
        return NotedRegion(region, self)

    def process_renderables(
        self, renderables: list[rich.console.ConsoleRenderable]
    ) -> list[rich.console.ConsoleRenderable]:
        """What is printed next, with a control before it that erases."""
        grown = self.grown(self.terminal.size.width)
        # Each draw notes its widths anew; what is erased once is gone.
        self.widths = ()
        up = [
            (rich.control.ControlType.CURSOR_UP, 1),
            (rich.control.ControlType.ERASE_IN_LINE, 2),
        ]
        return [rich.control.Control(*up * grown), *renderables] if grown else renderables

    def grown(self, width: int) -> int:
        """The rows that wrapping adds to the region at this width."""
        return sum(max(1, -(-length // max(1, width))) - 1 for length in self.widths)


@dataclass
class NotedRegion:
    """A region that notes the widths of its lines.

    Example: a Panel on a terminal of 80 columns: each of its lines is 80 wide.
    """

    region: rich.console.RenderableType
    noted_by: Rewrapped

    def __rich_console__(
        self, console: rich.console.Console, options: rich.console.ConsoleOptions
    ) -> Iterable[rich.segment.Segment]:
        lines = console.render_lines(self.region, options, pad=False)
        shown = lines[: options.size.height]
        self.noted_by.widths = tuple(rich.segment.Segment.get_line_length(line) for line in shown)
        for i, line in enumerate(lines):
            if i:
                yield rich.segment.Segment.line()
            yield from line
