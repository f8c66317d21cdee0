"""`make conformance ARGS=NAME` prints the table, or some variants with formulas.

make conformance ARGS='--write FILE'    write the page of the documentation
make conformance ARGS=--record          run other frameworks' own functions, those
                                        that are installed, and keep what they gave
"""

import json
import sys
from pathlib import Path

from conformance import adapters


def main(arguments: list[str]) -> None:
    """Does what the arguments ask for."""
    if arguments[:1] == ["--record"]:
        return record()
    # our algorithms and jax are imported from here on
    from conformance import table

    if arguments[:1] == ["--write"]:
        Path(arguments[1]).write_text(table.page(table.cells()), encoding="utf-8")
        return
    found = table.cells(arguments)
    if not found:
        sys.exit(f"no variant is called {' or '.join(arguments)}; without a name, all are shown")
    print(table.for_terminal(found, with_formulas=bool(arguments)))


def record() -> None:
    """Keep what the installed frameworks gave beside what others gave before."""
    # what cannot be run here stays as it was
    known = adapters.recorded()
    for framework, (_, name, install) in adapters.INSTALL.items():
        if not adapters.is_installed(framework):
            print(f"{name} is not installed: {install}")
            continue
        known[framework] = adapters.run_own_functions(framework)
        print(f"{name} {known[framework]['version']}: {len(known[framework]['cells'])} functions")
    adapters.RECORDED.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
