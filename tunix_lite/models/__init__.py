"""The model: a table of weights and a function, and what reads them."""
