"""Sampling chains, records and tokens that vision-language-action policies share."""
