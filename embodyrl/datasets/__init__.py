"""Former module of data sets; import from `embodyrl.extensions` instead. Removed in the next release."""
