"""The command line: thin, and with run_training.py the only code that knows Hydra."""
