"""Train a model: `python run_training.py algorithm=grpo task=arithmetic optimizer.learning_rate=1e-4`.

Every setting in conf/ can be given on the command line; `--help` lists them, `--cfg job` shows what would run.
"""

from tunix_lite.commands.train import main

if __name__ == "__main__":
    main()
