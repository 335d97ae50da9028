"""Former place of data sets; import from `embodyrl.extensions` instead. Goes with the next release."""
