"""One run in one folder: how it is set up, resumed, evaluated, measured, and how it ends."""
