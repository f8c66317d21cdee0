"""Tab completion: `eval "$(tunix-lite -sc install=bash)"`.

The shell asks `tunix-lite -sc query=bash` at each TAB. The answer comes from the text of conf/, so
it imports neither jax nor Hydra, and is there at once.
"""

import os
import sys
from collections.abc import Iterator, Mapping

from tunix_lite.commands.help import COMMANDS, FLAGS, all_settings, groups, options, settings_in
from tunix_lite.distributed.command_line import conf_dir

# A candidate that ends the word ends in a space; readline is told to add none. bash takes a word
# apart at `=` and `:`, so what stands before the last of them is cut off again. Where there is no
# candidate, readline offers files and folders (-o default).
BASH = r"""
_tunix_lite() {
  local IFS=$'\n' line="${COMP_LINE:0:COMP_POINT}"
  local word="${line##* }"
  COMPREPLY=($(COMP_LINE="$line" "${COMP_WORDS[0]}" -sc query=bash 2>/dev/null))
  local cut="${word%"${word##*[=:]}"}"
  if [[ "$COMP_WORDBREAKS" == *=* && -n "$cut" ]]; then
    COMPREPLY=("${COMPREPLY[@]#"$cut"}")
  fi
}
complete -o nospace -o default -F _tunix_lite tunix-lite
"""
ASK = ("-sc", "--shell-completion")


def asked(argv: list[str]) -> bool:
    """Returns whether a command line is about completion."""
    return bool(argv) and argv[0].partition("=")[0] in ASK


def answer(argv: list[str], environ: Mapping[str, str] = os.environ) -> None:
    """Does what `-sc install=bash`, `-sc uninstall=bash` or `-sc query=bash` asks for."""
    what = argv[1] if len(argv) > 1 else ""
    if what == "install=bash":
        print(BASH)
    elif what == "uninstall=bash":
        print("complete -r tunix-lite; unset -f _tunix_lite")
    elif what == "query=bash":
        print("\n".join(candidates(environ.get("COMP_LINE", ""))))
    else:
        print(
            f"error: {' '.join(argv)}: it is -sc install=bash, uninstall=bash or query=bash",
            file=sys.stderr,
        )
        sys.exit(2)


def candidates(line: str) -> list[str]:
    """Lists the completions of the last word of a command line."""
    _, *typed = line.split(" ")
    *before, word = typed or [""]
    return sorted({each for each in _all(before, word) if each.startswith(word)})


def _all(before: list[str], word: str) -> Iterator[str]:
    """Lists what may follow these words."""
    key, equals, _ = word.partition("=")
    if equals:
        is_switch = isinstance(all_settings(before).get(key), bool)
        values = options(key) if key in groups() else ["true", "false"] if is_switch else []
        yield from (f"{key}={value} " for value in values)
        return
    if not before:
        yield from (f"{name} " for name in COMMANDS)
    if not before or word.startswith("-"):
        yield from (f"{flag.split()[0].rstrip(',')} " for flag in FLAGS)
        return
    yield from (f"{group}=" for group in groups())
    own = conf_dir() / "command" / f"{before[0]}.yaml"
    of_command = settings_in(own) if own.is_file() else ()
    # section by section: training. and then its settings
    depth = word.count(".")
    for name in [*all_settings(before), "hydra.run.dir", "resume", *of_command]:
        parts = name.split(".")
        yield f"{name}=" if len(parts) <= depth + 1 else ".".join(parts[: depth + 1]) + "."
