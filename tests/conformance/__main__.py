"""`make conformance ARGS=NAME` prints the table, or some variants with formulas.

make conformance ARGS='--write FILE'    write the page of the documentation
"""

import sys
from pathlib import Path

from conformance import table


def main(arguments: list[str]) -> None:
    """Does what the arguments ask for."""
    if arguments[:1] == ["--write"]:
        Path(arguments[1]).write_text(table.page(table.cells()), encoding="utf-8")
        return
    found = table.cells(arguments)
    if not found:
        sys.exit(f"no variant is called {' or '.join(arguments)}; without a name, all are shown")
    print(table.for_terminal(found, with_formulas=bool(arguments)))


if __name__ == "__main__":
    main(sys.argv[1:])
