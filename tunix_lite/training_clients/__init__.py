"""A base model and training clients beside it: gradients, updates and samples for a loop of your
own. The loop of a run is train.py."""
