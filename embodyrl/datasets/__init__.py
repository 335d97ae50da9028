"""Deprecated module of data sets, to be removed in the next release; import from `embodyrl.extensions`."""
