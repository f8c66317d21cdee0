"""Train a model: `python run_training.py algorithm=grpo task=arithmetic
optimizer.learning_rate=1e-4`.

Every setting in conf/ can be given on the command line; `--help` lists them, `--cfg job` shows what
would run.
"""

import sys


def main() -> None:
    try:
        from tunix_lite.commands import help

        if help.answered(sys.argv[1:]):
            return
        # JAX takes a second to import, which --help does not wait for.
        from tunix_lite.commands import train
    except ModuleNotFoundError as error:
        # Most likely the environment is not active in this shell.
        if error.name is None or error.name.startswith("tunix_lite"):
            raise
        sys.exit(
            f"error: no module named {error.name}: source .venv/bin/activate "
            "(`make install` makes it)"
        )
    train.main()


if __name__ == "__main__":
    main()
