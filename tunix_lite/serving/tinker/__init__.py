"""A server that speaks the protocol of the Tinker SDK: training and sampling over HTTP."""
